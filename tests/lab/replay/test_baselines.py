"""The baselines as balancers: their books, whatever happens to nodes and calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.replay.baselines import BASELINES, Baseline, TrackingBalancer, make
from extproc.lab.replay.baselines_rules import Ask, Row
from extproc.lab.replay.types import Call, Machine, NodeView

BLOCK = 100
MACHINES = [Machine(f"node-{i}", cache_tokens=3000, speed=1.0 + i % 2) for i in range(4)]
NAMES = [machine.name for machine in MACHINES]


def call(first: int, blocks: int, *, answer: int = 0, tokens: int | None = None) -> Call:
    """Prompts of the same `first` share their blocks."""
    numbers = [first * 1000 + i for i in range(blocks + answer)]
    chains = [array("Q", part).tobytes() for part in (numbers[:blocks], numbers[blocks:])]
    return Call(0.0, blocks * BLOCK if tokens is None else tokens, 50, *chains)


def views(up: Sequence[bool] = (True,) * 4) -> list[NodeView]:
    return [NodeView(name, 0, 0, 0.0, 0.1, each) for name, each in zip(NAMES, up, strict=True)]


def built(name: str, *, seed: int = 0, machines: Sequence[Machine] = MACHINES) -> TrackingBalancer:
    balancer = make(name, seed=seed, machines=machines, block_tokens=BLOCK)
    assert isinstance(balancer, TrackingBalancer)
    balancer.nodes_changed([machine.name for machine in machines], 0.0)
    return balancer


def test_an_unknown_baseline_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no baseline 'best'; choose one of random, .*lmetric"):
        make("best", seed=0, machines=MACHINES, block_tokens=BLOCK)


def test_a_baseline_needs_a_machine() -> None:
    with pytest.raises(ValueError, match="at least one machine"):
        make("gie", seed=0, machines=[], block_tokens=BLOCK)


def story(balancer: TrackingBalancer, seed: int) -> list[int | None]:
    """Two hundred calls on nodes that fail, leave and come back, with retries; all end."""
    random, now = Random(seed), 0.0
    names, up = list(NAMES), [True] * 4
    open_calls: dict[int, tuple[Call, int]] = {}
    chosen: list[int | None] = []
    for number in range(200):
        now += random.random()
        if random.random() < 0.1:
            up = [random.random() < 0.7 for _ in names]
        if random.random() < 0.05:
            names = random.choice([NAMES[:3], NAMES, NAMES[1:]])
            up = [True] * len(names)
            balancer.nodes_changed(names, now)
        nodes = [NodeView(name, random.randrange(3), 1, 0.5, 0.1, each) for name, each in zip(names, up, strict=True)]
        each = call(random.randrange(8), random.randrange(40), answer=1, tokens=random.randrange(1, 4000))
        again = random.random() < 0.1 and open_calls
        key = random.choice(list(open_calls)) if again else number
        at = balancer.route(key, each, nodes, now)
        chosen.append(at)
        open_calls.pop(key, None)
        if at is None:
            assert not any(up)
        else:
            assert up[at]
            open_calls[key] = each, at
        for key, (its, at) in list(open_calls.items()):
            if random.random() < 0.2:
                balancer.first_token(key, its, at, now)
            if random.random() < 0.1:
                balancer.done(key, its, at, now, ok=random.random() < 0.9)
                del open_calls[key]
        assert sum(balancer.in_flight().values()) <= len(open_calls)
        assert all(blocks <= 3000 // BLOCK for blocks in balancer.held_blocks().values())
    for key, (its, at) in open_calls.items():
        balancer.done(key, its, at, now, ok=True)
        balancer.done(key, its, at, now, ok=True)
    return chosen


@pytest.mark.parametrize("name", BASELINES)
def test_whatever_happens_only_nodes_that_are_up_are_chosen_and_the_books_balance(name: str) -> None:
    balancer = built(name)
    first = story(balancer, 1)
    assert set(balancer.in_flight().values()) == {0}
    assert set(balancer.queued_tokens().values()) == {0}
    assert len(set(first)) > 2
    assert story(built(name), 1) == first


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(sorted(BASELINES)), st.integers(0, 2**32))
def test_any_story_ends_with_nothing_in_flight(name: str, seed: int) -> None:
    balancer = built(name, seed=seed)
    story(balancer, seed)
    assert set(balancer.in_flight().values()) == {0}
    assert set(balancer.queued_tokens().values()) == {0}


def test_the_seed_decides() -> None:
    def choices(seed: int) -> list[int | None]:
        balancer = built("random", seed=seed)
        return [balancer.route(number, call(1, 4), views(), 0.0) for number in range(20)]

    assert choices(1) == choices(1) != choices(2)


@pytest.mark.parametrize("name", ["gie", "llm-d", "dynamo", "dynamo-ttl", "sglang", "smg", "aibrix", "lmetric"])
def test_a_prompt_returns_to_the_node_that_holds_it(name: str) -> None:
    balancer = built(name)
    homes = {}
    for number, first in enumerate((1, 2, 3, 4)):
        homes[first] = balancer.route(number, call(first, 7), views(), 0.0)
        balancer.first_token(number, call(first, 7), homes[first] or 0, 0.5)
        balancer.done(number, call(first, 7), homes[first] or 0, 1.0, ok=True)
    for number in range(4, 100):
        first = 1 + number % 4
        at = balancer.route(number, call(first, 7), views(), 2.0)
        assert at == homes[first]
        balancer.done(number, call(first, 7), at, 3.0, ok=True)


def test_a_call_counts_as_queued_until_its_first_token_and_as_in_flight_until_it_ends() -> None:
    balancer = built("lmetric")
    one = call(1, 10)
    at = balancer.route(0, one, views(), 0.0)
    assert at is not None
    assert (balancer.in_flight()[NAMES[at]], balancer.queued_tokens()[NAMES[at]]) == (1, 1000)
    # the index knows the prompt at once: of the same again, the last token is left
    assert balancer.route(1, one, views([each == at for each in range(4)]), 0.0) == at
    assert (balancer.in_flight()[NAMES[at]], balancer.queued_tokens()[NAMES[at]]) == (2, 1001)
    balancer.done(1, one, at, 0.5, ok=True)
    balancer.first_token(0, one, at, 1.0)
    balancer.first_token(0, one, at, 1.0)
    assert (balancer.in_flight()[NAMES[at]], balancer.queued_tokens()[NAMES[at]]) == (1, 0)
    balancer.done(0, one, at, 2.0, ok=True)
    assert (balancer.in_flight()[NAMES[at]], balancer.queued_tokens()[NAMES[at]]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("gie", 9), ("sglang", 9), ("preble", 9), ("dynamo-ttl", 9)]
    + [(name, 12) for name in ("llm-d", "dynamo", "smg", "aibrix", "lmetric")],
)
def test_only_those_that_read_events_know_answers(name: str, blocks: int) -> None:
    balancer = built(name)
    at = balancer.route(0, call(1, 9, answer=3), views(), 0.0)
    assert at is not None
    balancer.done(0, call(1, 9, answer=3), at, 1.0, ok=True)
    assert balancer.held_blocks()[NAMES[at]] == blocks


class Witness:
    """A rule that keeps what it was told, and takes the first node."""

    def __init__(self) -> None:
        self.ask: Ask | None = None
        self.rows: Sequence[Row] = ()

    def __call__(self, ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
        self.ask, self.rows = ask, rows
        return rows[0]


def test_a_rule_is_told_what_is_known_of_call_and_nodes() -> None:
    witness = Witness()
    machines = [Machine("a", 1000.0, 600, speed=2.0), Machine("b", 1000.0, 900, speed=1.0)]
    balancer = TrackingBalancer(
        Baseline(witness, active=True, work=True), seed=0, machines=machines, block_tokens=BLOCK
    )
    balancer.nodes_changed(["a", "b"], 0.0)
    nodes = [NodeView("a", 1, 2, 0.3, 0.1, True), NodeView("b", 4, 5, 0.6, 0.1, True)]

    balancer.route(0, call(1, 4, tokens=450), nodes, 0.0)
    assert witness.ask == Ask(0, 450, 4, BLOCK, call(1, 4).chain[8:16], 1500.0)
    assert witness.rows[0] == Row(0, "a", 1, 2, 0.3, 0, 0, 0, 450, 0, 4, 0.0, 0.0, 0.225)
    assert witness.rows[1] == Row(1, "b", 4, 5, 0.6, 0, 0, 0, 450, 0, 4, 0.0, 0.0, 0.45)

    # three of its four blocks, and three others: six fit into the cache
    balancer.route(1, call(1, 3, tokens=300), nodes, 1.0)
    balancer.route(2, call(2, 3, tokens=300), nodes, 1.0)
    assert witness.rows[0] == Row(0, "a", 1, 2, 0.3, 2, 451, 0, 300, 4, 3, pytest.approx(0.2255), 0.05, 0.15)
    balancer.first_token(0, call(1, 4), 0, 2.0)
    balancer.done(1, call(1, 3), 0, 2.0, ok=True)
    balancer.route(3, call(1, 4, tokens=450), nodes, 3.0)
    # it had to drop the tail of the first prompt; 50 tokens of answer were added to its work
    assert witness.rows[0][5:] == (2, 300, 3, 150, 7, 0, pytest.approx(0.4005), 0.05, 0.075)
    assert witness.ask == Ask(3, 450, 4, BLOCK, call(1, 4).chain[8:16], 1500.0)

    # three minutes later nothing of that counts, but what is in flight
    balancer.route(4, call(3, 6), nodes, 190.0)
    assert witness.rows[0][5:] == (3, 450, 0, 600, 7, 6, 0.0, 0.0, 0.3)


def test_a_head_is_two_blocks_or_the_only_one() -> None:
    witness = Witness()
    balancer = TrackingBalancer(Baseline(witness), seed=0, machines=MACHINES, block_tokens=BLOCK)
    balancer.nodes_changed(NAMES, 0.0)
    heads = []
    for number, blocks in enumerate((1, 2, 3)):
        balancer.route(number, call(1, blocks), views(), 0.0)
        assert witness.ask is not None
        heads.append(witness.ask.head)
    assert heads == [call(1, 2).chain[:8], call(1, 2).chain[8:], call(1, 2).chain[8:]]


def test_prompts_without_a_full_block_have_heads_of_their_own() -> None:
    # each with a balancer of its own: what is in flight would spread them as well
    chosen = {built("kubeai").route(number, call(1, 0, tokens=9), views(), 0.0) for number in range(40)}
    assert chosen == {0, 1, 2, 3}


def test_what_is_known_of_a_node_stays_when_others_come_and_go() -> None:
    balancer = built("gie")
    at = balancer.route(0, call(1, 9), views([False, True, False, False]), 0.0)
    balancer.nodes_changed(NAMES[1:], 1.0)
    assert balancer.in_flight() == {"node-1": 1, "node-2": 0, "node-3": 0}
    assert balancer.held_blocks() == {"node-1": 9, "node-2": 0, "node-3": 0}
    balancer.done(0, call(1, 9), at or 0, 2.0, ok=True)
    assert set(balancer.in_flight().values()) == {0}


def test_an_index_has_the_size_of_its_nodes_cache() -> None:
    machines = [Machine("small", cache_tokens=500), Machine("large", cache_tokens=5000)]
    balancer = built("gie", machines=machines)
    nodes = [NodeView("small", 0, 0, 0.0, 0.1, True), NodeView("large", 9, 0, 0.0, 0.1, True)]
    assert balancer.route(0, call(0, 60), nodes, 0.0) == 0
    assert balancer.route(1, call(1, 60), [nodes[0]._replace(waiting=99), nodes[1]], 0.0) == 1
    assert balancer.held_blocks() == {"small": 5, "large": 50}


def test_a_node_that_failed_or_is_down_holds_nothing() -> None:
    balancer = built("gie")
    at = balancer.route(0, call(1, 9), views(), 0.0)
    assert at is not None
    assert balancer.held_blocks()[NAMES[at]] == 9
    balancer.done(0, call(1, 9), at, 1.0, ok=False)
    assert balancer.held_blocks()[NAMES[at]] == 0
    up = [False] * 4
    up[balancer.route(1, call(1, 9), views(), 2.0) or 0] = True
    other = balancer.route(2, call(2, 9), views([not each for each in up]), 3.0)
    assert other is not None
    assert [blocks for blocks in balancer.held_blocks().values() if blocks] == [9]
    assert balancer.held_blocks()[NAMES[other]] == 9


def test_without_events_dynamo_forgets_after_two_minutes() -> None:
    def choices(now: float) -> set[int | None]:
        found = set()
        for seed in range(20):
            balancer = built("dynamo-ttl", seed=seed)
            balancer.route(0, call(1, 9), views([True, False, False, False]), 0.0)
            balancer.done(0, call(1, 9), 0, 1.0, ok=True)
            found.add(balancer.route(1, call(1, 9), views(), now))
        return found

    assert choices(120.0) == {0}
    assert choices(120.1) == {0, 1, 2, 3}


def test_a_node_that_comes_later_is_taken_for_one_like_the_first() -> None:
    balancer = built("gie")
    balancer.nodes_changed([*NAMES, "node-9"], 1.0)
    assert balancer.route(0, call(1, 40), [*views([False] * 4), NodeView("node-9", 0, 0, 0.0, 0.1, True)], 2.0) == 4
    assert balancer.held_blocks()["node-9"] == 30
