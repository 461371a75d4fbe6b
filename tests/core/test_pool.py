"""One pool, several block sizes: what each node is matched in, and what a session tells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.blocks import TOKEN_BYTES, block_hashes
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.pool import MAX_BLOCK_SIZES, Pool
from extproc.core.types import Candidate, InferenceRequest, LoadSample, Node, Stored
from extproc.policies.least_ttft import LeastTtft

SIZES = (8, 16, 32, 48, 64, 96, 128)


def nodes(names: str) -> list[Node]:
    return [Node(name, f"10.0.0.{ord(name)}:80", name) for name in names]


def pool_of(names: str, *, block_tokens: int = 64, exact: bool = True, cache_tokens: int = 100_000) -> Pool:
    fleet = Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, LeastTtft(), block_tokens, cache_tokens, exact)
    pool.replace(nodes(names))
    return pool


def tells(pool: Pool, node: str, block_tokens: int | None, *, at_s: float = 0.0, started_at_s: float = 1.0) -> bool:
    return pool.observe(node, LoadSample(at_s, block_tokens=block_tokens, started_at_s=started_at_s))


def prompt(text: str, *, cut: bool = False, exact: bool = True, session: int | None = None) -> InferenceRequest:
    """One token a letter, in every size."""

    def chains(salt: int) -> dict[int, bytes]:
        return {size: block_hashes(data, block_tokens=size, salt=salt) for size in SIZES}

    data = "".join(letter * TOKEN_BYTES for letter in text).encode()
    return InferenceRequest("m", len(text), chains(1), chains(2) if cut else None, exact, session)


def unkeyed(tokens: int, session: int | None) -> InferenceRequest:
    return InferenceRequest("m", tokens, session=session)


def seen(pool: Pool, request: InferenceRequest, *, now: float = 1.0) -> dict[str, Candidate]:
    return {each.node.id: each for each in pool.candidates(request, now=now)}


# ---- block sizes ----


@pytest.mark.parametrize(
    ("exact", "told", "sizes", "matched"),
    [
        (True, {}, (64,), {"a": 64, "b": 64, "c": 64}),
        (True, {"a": 16, "b": 32}, (16, 32, 64), {"a": 112, "b": 96, "c": 64}),  # c does not say
        (True, {"a": 16, "b": 16, "c": 16}, (16,), {"a": 112, "b": 112, "c": 112}),
        (True, {"a": 16, "b": 64, "c": 128}, (16, 64, 128), {"a": 112, "b": 64}),  # longer than the prompt: no block
        (False, {"a": 16, "b": 32}, (64,), {"a": 64, "b": 64, "c": 64}),
    ],
)
def test_each_node_is_matched_in_blocks_of_its_own_size(
    exact: bool, told: dict[str, int], sizes: tuple[int, ...], matched: dict[str, int]
) -> None:
    pool = pool_of("abc", exact=exact)
    for node, size in told.items():
        tells(pool, node, size)
    request = prompt("x" * 120)
    for node in "abc":
        pool.store(node, request, now=1.0)
    assert pool.block_sizes() == sizes
    assert pool.matched(request) == matched
    assert {node: each.matched_tokens for node, each in seen(pool, request).items()} == dict.fromkeys(
        "abc", 0
    ) | matched
    assert {node: each.uncached_tokens for node, each in seen(pool, request).items()} == {
        node: 120 - matched.get(node, 0) for node in "abc"
    }


def test_a_node_that_changes_its_size_holds_nothing_and_the_others_what_they_held() -> None:
    pool, request = pool_of("ab"), prompt("x" * 100)
    for node in "ab":
        tells(pool, node, 16)
        pool.store(node, request, now=1.0)
    tells(pool, "a", 32)
    assert pool.block_sizes() == (16, 32)
    assert pool.matched(request) == {"b": 96}
    pool.store("a", request, now=2.0)
    assert (pool.blocks("a"), pool.blocks("b")) == (3, 6)
    tells(pool, "b", 32)
    assert pool.block_sizes() == (32,)
    assert pool.matched(request) == {"a": 96}


def test_a_scrape_that_does_not_tell_the_size_changes_nothing() -> None:
    pool, request = pool_of("a"), prompt("x" * 100)
    tells(pool, "a", 16)
    pool.store("a", request, now=1.0)
    tells(pool, "a", None)
    pool.replace(nodes("a"))
    assert (pool.block_sizes(), pool.matched(request)) == ((16,), {"a": 96})


def test_without_nodes_there_is_a_size_to_hash_in() -> None:
    pool = pool_of("")
    assert pool.block_sizes() == (64,)
    pool.replace(nodes("a"))
    tells(pool, "a", 16)
    pool.replace([])
    assert pool.block_sizes() == (64,)
    assert pool.segments() == 0


def test_no_more_sizes_are_in_use_than_the_bound_and_a_place_that_is_free_is_taken() -> None:
    pool, request = pool_of("abcdef"), prompt("x" * 120)
    for node, size in zip("abcde", SIZES, strict=False):  # f does not say: 64
        tells(pool, node, size)
        assert len(pool.block_sizes()) <= MAX_BLOCK_SIZES
    assert pool.block_sizes() == (8, 16, 32, 64)
    for node in "abcdef":
        pool.store(node, request, now=1.0)
    assert pool.matched(request)["d"] == 64  # 48 found no place
    tells(pool, "a", 16)
    tells(pool, "d", 48)
    assert pool.block_sizes() == (16, 32, 48, 64)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([None, *SIZES]), st.booleans()), max_size=40))
def test_whatever_nodes_tell_the_sizes_in_use_are_bounded_and_those_of_the_maps(
    told: list[tuple[str, int | None, bool]],
) -> None:
    pool, here = pool_of("abcdefgh"), set("abcdefgh")
    for node, size, leaves in told:
        if leaves:
            here ^= {node}
            pool.replace(nodes("".join(sorted(here))))
        else:
            tells(pool, node, size)
        assert pool.block_sizes() == (tuple(sorted(pool.prefix_maps)) or (64,))
        assert len(pool.block_sizes()) <= MAX_BLOCK_SIZES
        assert all(pool.blocks(each) == 0 for each in here)


def test_a_cache_is_as_many_blocks_of_the_nodes_own_size_as_it_has_room_for() -> None:
    pool = pool_of("ab", cache_tokens=640)
    pool.observe("a", LoadSample(0.0, cache_tokens=320, block_tokens=16))
    tells(pool, "b", 32)
    for node in "ab":
        pool.store(node, prompt("x" * 2000), now=1.0)
    assert (pool.blocks("a"), pool.blocks("b")) == (20, 20)
    pool.replace(nodes("ab"))
    assert (pool.blocks("a"), pool.blocks("b")) == (20, 20)


@pytest.mark.parametrize(
    ("exact", "tokens", "size", "matched"),
    [
        (True, 96, 16, 80),  # the block of the last token is computed again
        (True, 97, 16, 96),
        (True, 96, 32, 64),
        (True, 100, 32, 96),
        (True, 32, 32, 0),
        (True, 33, 32, 32),
        (False, 96, 16, 95),  # nobody knows where the engine's blocks end: but for one token, all of it
        (False, 100, 32, 96),
    ],
)
def test_of_a_prompt_that_is_there_whole_the_last_token_is_computed_again(
    exact: bool, tokens: int, size: int, matched: int
) -> None:
    pool, request = pool_of("a", block_tokens=size, exact=exact), prompt("x" * tokens, exact=exact)
    pool.store("a", request, now=1.0)
    candidate = seen(pool, request)["a"]
    assert (candidate.matched_tokens, candidate.uncached_tokens) == (matched, tokens - matched)


def test_a_prompt_of_no_known_length_is_matched_without_harm() -> None:
    pool, request = pool_of("a"), prompt("x" * 128)
    pool.store("a", request, now=1.0)
    unknown = InferenceRequest("m", 0, request.chains, exact=True)
    candidate = seen(pool, unknown)["a"]
    assert (candidate.matched_tokens, candidate.uncached_tokens) == (0, 0)


texts = st.text(alphabet="xy", min_size=1, max_size=6).map(lambda text: "".join(letter * 16 for letter in text))
steps = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.sampled_from(["store", "extend", "take back", "restart"]), texts, st.booleans()
    ),
    max_size=25,
)


@given(steps, st.sampled_from([(16, 32), (16, 48), (8, 64)]), texts, st.integers(100, 400))
@settings(deadline=None)
def test_among_nodes_of_two_sizes_each_is_matched_as_among_nodes_of_its_own_alone(
    script: list[tuple[str, str, str, bool]], pair: tuple[int, int], probe: str, cache_tokens: int
) -> None:
    homes = {"ab": pair[0], "cd": pair[1]}
    mixed = pool_of("abcd", cache_tokens=cache_tokens)
    alone = {names: pool_of(names, block_tokens=size, cache_tokens=cache_tokens) for names, size in homes.items()}
    for names, size in homes.items():
        for node in names:
            tells(mixed, node, size)
            tells(alone[names], node, None)
    last: dict[str, tuple[str, Stored, Stored]] = {}
    for now, (node, step, text, cut) in enumerate(script, start=1):
        single = next(pool for names, pool in alone.items() if node in names)
        if step == "restart":
            for pool in (mixed, single):
                tells(pool, node, None, started_at_s=now + 1.0)
        elif step == "store":
            request = prompt(text, cut=cut)
            last[node] = (text, *(pool.store(node, request, now=float(now)) for pool in (mixed, single)))
        elif node in last:
            before, one, two = last.pop(node)
            if step == "extend":
                request = prompt(before + text)
                one = mixed.extend(node, one, request, now=float(now))
                two = single.extend(node, two, request, now=float(now))
                last[node] = (before + text, one, two)
            else:
                mixed.take_back(node, one)
                single.take_back(node, two)
    for cut in (False, True):
        request = prompt(probe, cut=cut)
        together = seen(mixed, request)
        for pool in alone.values():
            for node, candidate in seen(pool, request).items():
                assert together[node].matched_tokens == candidate.matched_tokens
                assert mixed.blocks(node) == pool.blocks(node)


# ---- sessions ----


@pytest.mark.parametrize(
    ("request_of", "estimate"),
    [
        (lambda: unkeyed(500, 7), 300),  # no more than the session's prompt had
        (lambda: unkeyed(200, 7), 200),  # nor than this one has
        (lambda: unkeyed(500, 8), None),  # another session
        (lambda: unkeyed(500, None), None),
        (lambda: prompt("x" * 500, cut=True, session=7), 300),
        (lambda: prompt("y" * 7, session=7), 7),  # less than a block
        (lambda: prompt("x" * 500, session=7), 0),  # it can be matched: what is not matched is not there
        (lambda: unkeyed(0, 7), 0),
    ],
)
def test_what_cannot_be_matched_is_expected_where_its_session_was(request_of: object, estimate: int | None) -> None:
    pool = pool_of("ab")
    pool.sessions.note(7, "b", 300, now=0.0)
    request = request_of()  # type: ignore[operator]
    found = seen(pool, request)
    b = found["b"]
    assert found["a"] == Candidate(
        nodes("a")[0],
        0,
        request.prompt_tokens,
        0.0,
        request.prompt_tokens / 1000,
        0,
        0.0,
        0.0,
        float("inf"),
        False,
        False,
    )
    assert (b.session, b.session_tokens) == (estimate is not None, estimate or 0)
    # the map's word and the work are as without it: an estimate is no match
    assert (b.matched_tokens, b.uncached_tokens) == (0, request.prompt_tokens)
    left = request.prompt_tokens - (estimate or 0)
    assert b.prefill_s == pytest.approx(max(left, 1 if estimate else 0) / 1000)


@pytest.mark.parametrize(("noted", "session_tokens"), [(100, 0), (128, 0), (129, 129), (400, 400)])
def test_of_a_cut_head_the_session_counts_where_it_is_more_than_what_is_matched(
    noted: int, session_tokens: int
) -> None:
    pool = pool_of("ab")
    pool.store("b", prompt("x" * 128, cut=True), now=1.0)
    pool.sessions.note(7, "b", noted, now=1.0)
    b = seen(pool, prompt("x" * 500, cut=True, session=7))["b"]
    assert (b.matched_tokens, b.session, b.session_tokens) == (128, True, session_tokens)
    assert b.prefill_s == pytest.approx((500 - max(128, session_tokens)) / 1000)


@pytest.mark.parametrize("state", ["left", "came back as another", "restarted", "suspect", "saturated", "an hour ago"])
def test_a_session_lets_expect_nothing_of_a_node_that_is_not_as_it_was(state: str) -> None:
    pool, now = pool_of("ab"), 1.0
    tells(pool, "b", 16)
    pool.sessions.note(7, "b", 300, now=0.0)
    if state == "left":
        pool.replace(nodes("a"))
    elif state == "came back as another":
        pool.replace(nodes("a"))
        pool.replace(nodes("ab"))
    elif state == "restarted":
        tells(pool, "b", 16, started_at_s=2.0)
    elif state == "suspect":
        pool.fleet.reserve("b", 0, now=1.0).failed(now=1.0)
    elif state == "saturated":
        pool.observe("b", LoadSample(1.0, waiting=100, started_at_s=1.0))
        pool.observe("a", LoadSample(1.0, waiting=0, started_at_s=1.0))
    else:
        now = 3601.0
    assert not any(each.session_tokens for each in seen(pool, unkeyed(500, 7), now=now).values())


def test_a_session_does_not_speak_for_a_node_that_had_more_than_its_share_of_work() -> None:
    pool = pool_of("abcd")
    pool.sessions.note(7, "b", 300, now=0.0)
    for _ in range(11):  # 1.25 times the mean, and eight more, are 11.6 requests
        pool.fleet.reserve("b", 300, now=0.0).release(first_token_at_s=0.0, now=0.0)
    assert seen(pool, unkeyed(300, 7), now=0.0)["b"].session
    pool.fleet.reserve("b", 300, now=0.0).release(first_token_at_s=0.0, now=0.0)
    assert not seen(pool, unkeyed(300, 7), now=0.0)["b"].session
    for node in "acd":  # work of others is no reason
        pool.fleet.reserve(node, 3000, now=0.0).release(first_token_at_s=0.0, now=0.0)
    assert seen(pool, unkeyed(300, 7), now=0.0)["b"].session
