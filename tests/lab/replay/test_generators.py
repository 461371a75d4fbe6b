"""Made-up traces: their blocks tell what is a prefix of what, their order what waits for what."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import HASH_BYTES
from extproc.lab.replay import traces
from extproc.lab.replay.generators import GENERATORS
from extproc.lab.replay.types import Trace
from tests.lab.replay.trace_checks import check

SMALL: dict[str, Mapping[str, float]] = {
    "groups": {"groups": 4, "prompts": 3, "calls": 40},
    "chat": {"conversations": 12, "systems": 3},
    "agents": {"agents": 5, "least_turns": 2, "most_turns": 9, "prefix_tokens": 1000},
    "hot": {"calls": 60, "prefixes": 5},
    "flash": {"conversations": 8, "crowd": 20},
    "tenants": {"tenants": 3, "conversations": 4, "flood": 20},
    "mixed": {"calls": 60, "burst_every_s": 2.0},
}
SEEDS = st.integers(0, 2**32)


def made(name: str, seed: int) -> Trace:
    return traces.load(name, seed=seed, options=SMALL[name])


def test_every_generator_has_a_small_one_here() -> None:
    assert SMALL.keys() == GENERATORS.keys()


@pytest.mark.parametrize("name", SMALL)
@given(seed=SEEDS)
def test_traces_are_in_order_and_their_blocks_are_chains(name: str, seed: int) -> None:
    check(made(name, seed))


@pytest.mark.parametrize("name", SMALL)
@given(seed=SEEDS)
def test_a_seed_makes_one_trace_and_another_seed_another(name: str, seed: int) -> None:
    assert made(name, seed) == made(name, seed) != made(name, seed + 1)


@pytest.mark.parametrize("name", ["chat", "agents", "flash", "tenants"])
@given(seed=SEEDS)
def test_the_next_turn_begins_with_the_prompt_and_the_answer_before(name: str, seed: int) -> None:
    trace = made(name, seed)
    turns = [(trace.calls[call.after], call) for call in trace.calls if call.after is not None]
    assert all(turn.chain.startswith(before.chain + before.answer) for before, turn in turns)
    assert all(turn.prompt_tokens > before.prompt_tokens + before.answer_tokens for before, turn in turns)


@pytest.mark.parametrize("name", GENERATORS)
def test_by_default_there_are_a_few_thousand_calls_in_minutes(name: str) -> None:
    trace = traces.load(name, seed=1)
    assert 3000 <= len(trace.calls) <= 10_000
    assert 200 < trace.calls[-1].at_s < 3600


def test_groups_are_sent_again_and_again() -> None:
    trace = traces.load("groups:groups=4,prompts=3,calls=60", seed=1)
    prompts = [call.chain for call in trace.calls]
    assert len(set(prompts)) == 12
    assert prompts[:12] == prompts[12:24]
    heads = [prompt[: HASH_BYTES * (6000 // 64)] for prompt in prompts]
    assert len(set(heads)) == 4
    assert sum(one != other for one, other in pairwise(heads[:12])) > 4  # not a group after the other
    assert {(call.prompt_tokens, call.answer_tokens) for call in trace.calls} == {(7200, 1000)}


def test_a_ladder_ends_at_its_last_rate() -> None:
    calls = traces.load("groups:calls=8000,per_s=3,last_per_s=60", seed=1).calls
    first, last = (1000 / (calls[end].at_s - calls[begin].at_s) for begin, end in ((0, 1000), (6999, 7999)))
    assert first == pytest.approx(3, rel=0.15)
    assert last == pytest.approx(60, rel=0.15)


def test_most_calls_share_the_hot_prefix() -> None:
    share, tokens = traces.largest_prefix(traces.load("hot:share=0.7,hot_tokens=5000", seed=1))
    assert share == pytest.approx(0.7, abs=0.03)
    assert tokens == 5000 // 64 * 64


def test_the_crowd_comes_in_the_middle_and_nobody_knew_its_prefix() -> None:
    trace = traces.load("flash:crowd=500,crowd_per_s=50", seed=1)
    head = {call.chain[:HASH_BYTES] for call in trace.calls if call.prompt_tokens > 16_000 and call.session is None}
    assert len(head) == 1
    times = [call.at_s for call in trace.calls if call.chain[:HASH_BYTES] in head]
    assert len(times) == 500
    assert times[0] == pytest.approx(trace.calls[-1].at_s / 2, rel=0.05)
    assert times[-1] - times[0] == pytest.approx(10, rel=0.2)


def test_one_tenant_floods_and_no_tenant_shares_with_another() -> None:
    trace = traces.load("tenants:tenants=3,conversations=30,flood=400", seed=1)
    heads = [{call.chain[:HASH_BYTES] for call in trace.calls if call.tenant == tenant} for tenant in range(3)]
    assert len(set.union(*heads)) == sum(map(len, heads))
    counts = [sum(call.tenant == tenant and call.session is None for call in trace.calls) for tenant in range(3)]
    assert counts == [400, 0, 0]


def test_mixed_prompts_share_nothing_and_some_are_very_long() -> None:
    trace = traces.load("mixed", seed=1)
    assert traces.ideal_hit_ratio(trace) == 0.0
    assert traces.largest_prefix(trace) == (0.0, 0)
    assert 0.01 < sum(call.prompt_tokens > 15_000 for call in trace.calls) / len(trace.calls) < 0.1
