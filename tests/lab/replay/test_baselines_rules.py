"""The baselines' formulas on tables made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from extproc.lab.replay import baselines_rules as rules
from extproc.lab.replay.baselines_rules import Ask, Row, Rule

ASK = Ask(turn=0, prompt_tokens=1000, blocks=10, block_tokens=100, head=b"headhead", tokens_per_s=10_000.0)

ALL: list[Rule] = [
    rules.random_choice,
    rules.round_robin,
    rules.least_request,
    rules.power_of_two,
    rules.gie,
    rules.llm_d,
    rules.dynamo,
    rules.sglang,
    rules.smg,
    rules.aibrix,
    rules.kubeai,
    rules.preble,
    rules.lmetric,
]


def every_choice(rule: Rule, rows: Sequence[Row], ask: Ask = ASK) -> set[int]:
    return {rule(ask, rows, Random(seed)).at for seed in range(60)}


def choose(rule: Rule, *rows: Row, ask: Ask = ASK) -> int:
    """Which, whatever chance says."""
    (chosen,) = every_choice(rule, rows, ask)
    return chosen


def node(at: int, **known: float) -> Row:
    return Row(at, f"node-{at}", **known)  # type: ignore[arg-type]


def flights(*counts: int) -> list[Row]:
    return [node(at, in_flight=count) for at, count in enumerate(counts)]


@pytest.mark.parametrize("rule", ALL)
def test_one_node_is_chosen(rule: Rule) -> None:
    assert choose(rule, node(3)) == 3


@pytest.mark.parametrize("rule", ALL)
def test_a_prompt_without_a_full_block_is_routed(rule: Rule) -> None:
    assert every_choice(rule, [node(0), node(1)], ASK._replace(blocks=0, prompt_tokens=20)) <= {0, 1}


@pytest.mark.parametrize("rule", [each for each in ALL if each not in (rules.round_robin, rules.kubeai)])
def test_chance_decides_between_equals(rule: Rule) -> None:
    assert every_choice(rule, [node(0), node(1), node(2)]) == {0, 1, 2}


def test_round_robin_takes_turns() -> None:
    rows = [node(0), node(2), node(5)]
    assert [choose(rules.round_robin, *rows, ask=ASK._replace(turn=turn)) for turn in range(4)] == [0, 2, 5, 0]


def test_least_request_takes_the_fewest_in_flight() -> None:
    assert choose(rules.least_request, *flights(3, 1, 2)) == 1


def test_power_of_two_takes_the_lesser_of_two_different_nodes() -> None:
    assert every_choice(rules.power_of_two, flights(1, 2, 3)) == {0, 1}


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        # the picker's own case: 2*0.7 + 2*0.8, 2*1.0 + 2*0.9, 2*0.0 + 2*0.8
        ([node(0, waiting=3, kv_usage=0.2), node(1, kv_usage=0.1), node(2, waiting=10, kv_usage=0.2)], 1),
        # equal queues: 3*0.5 + 2*0.1 against 2*0.9
        ([node(0, matched=5, kv_usage=0.9), node(1, kv_usage=0.1)], 1),
        ([node(0, matched=6, kv_usage=0.9), node(1, kv_usage=0.1)], 0),
        # a whole match (3) outweighs the longest queue (2)
        ([node(0, matched=10, waiting=4), node(1)], 0),
        # two thirds do not
        ([node(0, matched=6, waiting=4), node(1)], 1),
    ],
)
def test_gie_weighs_match_queue_and_memory_3_2_2(rows: list[Row], chosen: int) -> None:
    assert choose(rules.gie, *rows) == chosen


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        # 0.8 is warm, and stays so with a longer queue
        ([node(0, matched=8, uncached_tokens=200, queued_tokens=5000), node(1, uncached_tokens=1000)], 0),
        # 0.7 is not
        ([node(0, matched=7, uncached_tokens=300, queued_tokens=5000), node(1, uncached_tokens=1000)], 1),
        # 18 s at 10,000 tokens/s are 180,000 tokens: up to there it waits, beyond it does not
        ([node(0, matched=9, uncached_tokens=100, queued_tokens=180_500), node(1, queued_tokens=500)], 0),
        ([node(0, matched=9, uncached_tokens=100, queued_tokens=180_501), node(1, queued_tokens=500)], 1),
        # the best of the warm ones counts, by its queue and the prompt's own tokens
        ([node(0, matched=8, uncached_tokens=200), node(1, matched=9, uncached_tokens=100, queued_tokens=99)], 1),
        ([node(0, matched=8, uncached_tokens=200), node(1, matched=9, uncached_tokens=100, queued_tokens=101)], 0),
        # none is warm: all, with what each has cached
        ([node(0, matched=4, uncached_tokens=600, queued_tokens=300), node(1, uncached_tokens=1000)], 0),
    ],
)
def test_llm_d_stays_with_the_warm_nodes_until_they_are_18_s_behind(rows: list[Row], chosen: int) -> None:
    assert choose(rules.llm_d, *rows) == chosen


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        # 10 - 4 + 0 + 6 = 12 against 10 + 1 + 10 = 21
        ([node(0, matched=4, new_blocks=6), node(1, active_blocks=1, new_blocks=10)], 0),
        # (500 + 1000) / 100 - 10 + 20 + 0 = 25 against 10 + 14 or 16
        ([node(0, queued_tokens=500, matched=10, active_blocks=20), node(1, active_blocks=4, new_blocks=10)], 1),
        ([node(0, queued_tokens=500, matched=10, active_blocks=20), node(1, active_blocks=6, new_blocks=10)], 0),
        # never below zero: 12 matched blocks are worth no more than 10
        ([node(0, matched=12, active_blocks=1), node(1, matched=10)], 1),
    ],
)
def test_dynamo_adds_prefill_without_overlap_and_decode_blocks(rows: list[Row], chosen: int) -> None:
    assert choose(rules.dynamo, *rows) == chosen


@pytest.mark.parametrize(
    ("matches", "in_flight", "chosen"),
    [
        ((4, 0), (64, 0), 0),  # a difference of 64 is balanced
        ((4, 0), (65, 0), 1),  # 65 is not, and then the match is nothing
        ((4, 0), (200, 134), 0),  # 66 more, but not 1.5 times
        ((4, 0), (210, 134), 1),
        ((3, 0), (1, 0), 1),  # 0.3 of the prompt is no match
        ((4, 5), (0, 60), 1),  # the longest, whatever its load
        ((5, 5), (9, 8), 1),
        ((0, 0), (1, 0), 1),
    ],
)
def test_sglang_switches_affinity_off_for_all(
    matches: tuple[int, int], in_flight: tuple[int, int], chosen: int
) -> None:
    rows = [node(at, matched=matches[at], in_flight=in_flight[at]) for at in (0, 1)]
    assert choose(rules.sglang, *rows) == chosen


def test_sglangs_switch_is_thrown_by_any_node() -> None:
    rows = [node(0, in_flight=65), node(1, matched=10, in_flight=1), node(2)]
    assert choose(rules.sglang, *rows) == 2
    assert choose(rules.smg, *rows) == 1


@pytest.mark.parametrize(
    ("holder", "others", "stays"),
    [
        (5, [1] * 9, True),  # mean 1.4, sigma 1.2: the margin is 4 nevertheless, and the bound 5.4
        (6, [1] * 9, False),  # mean 1.5: 5.5
        (29, [2] * 8 + [30], True),  # mean 7.5, sigma 11.0: 29.5
        (30, [2] * 9, False),  # mean 4.8, sigma 8.4: 21.6
        (190, [0, 100], False),  # mean 96.7, sigma 77.6: the margin is 64, not 155
        (60, [50] * 9, True),  # mean 51, sigma 3: above 57, but not above 76.5
    ],
)
def test_smg_passes_over_the_matched_node_that_is_far_above_the_mean(
    holder: int, others: list[int], stays: bool
) -> None:
    rows = [node(0, matched=9, in_flight=holder), *(node(at, in_flight=n) for at, n in enumerate(others, 1))]
    assert (every_choice(rules.smg, rows) == {0}) == stays


@pytest.mark.parametrize("full", [{"waiting": 8}, {"kv_usage": 0.8}])
def test_smg_leaves_out_full_nodes_while_another_is_not(full: dict[str, float]) -> None:
    assert choose(rules.smg, node(0, matched=9, **full), node(1, in_flight=3)) == 1
    assert choose(rules.smg, node(0, matched=9, **full), node(1, in_flight=3, **full)) == 0
    assert choose(rules.smg, node(0, matched=9, waiting=7, kv_usage=0.79), node(1)) == 0


@pytest.mark.parametrize(
    ("matches", "in_flight", "chosen"),
    [
        ((0, 5, 9), (0, 2, 4), 1),  # mean 2, sigma 1.63: the longest is above
        ((0, 5, 9), (1, 2, 3), 1),  # 3 is above 2.82
        ((0, 5, 9), (2, 2, 3), 1),  # mean 2.33, sigma 0.47
        ((0, 5, 9), (2, 3, 3), 2),  # mean 2.67, sigma 0.47
        ((0, 9, 9), (4, 3, 2), 2),  # equal matches: the fewest
        ((9, 1, 0), (9, 0, 0), 1),  # 9 apart: only the fewest may match
        ((9, 0, 0), (9, 1, 0), 2),
        ((0, 9, 0), (0, 1, 9), 0),
        ((0, 9, 0), (0, 1, 8), 1),  # mean 3, sigma 3.6
        ((0, 0, 0), (2, 1, 2), 1),
    ],
)
def test_aibrix_takes_the_best_match_within_one_deviation(
    matches: tuple[int, ...], in_flight: tuple[int, ...], chosen: int
) -> None:
    rows = [node(at, matched=matches[at], in_flight=in_flight[at]) for at in range(3)]
    assert choose(rules.aibrix, *rows) == chosen


def test_kubeai_sends_a_head_to_one_node_and_heads_to_all() -> None:
    rows = flights(0, 0, 0, 0)
    heads = [ASK._replace(head=bytes([i] * 8)) for i in range(100)]
    assert {choose(rules.kubeai, *rows, ask=ask) for ask in heads} == {0, 1, 2, 3}
    assert len(every_choice(rules.kubeai, rows)) == 1


def test_kubeai_walks_on_from_a_node_above_the_bound() -> None:
    home = choose(rules.kubeai, *flights(0, 0, 0, 0))
    # 1.25 * (19 + 1) / 4 = 6.25: 5 + 1 is within, 6 + 1 is not
    within, above = [5, 5, 5, 5], [5, 5, 5, 5]
    within[home - 1] = 4
    above[home], above[home - 1] = 6, 3
    assert choose(rules.kubeai, *flights(*within)) == home
    following = choose(rules.kubeai, *flights(*above))
    assert following != home
    # and on again, always to the same
    assert choose(rules.kubeai, *flights(*(6 if at in {home, following} else 3 for at in range(4)))) not in {
        home,
        following,
    }


def test_kubeai_moves_only_the_heads_of_a_node_that_left() -> None:
    heads = [ASK._replace(head=bytes([i] * 8)) for i in range(100)]
    rows = flights(0, 0, 0, 0)
    for ask in heads:
        before = choose(rules.kubeai, *rows, ask=ask)
        after = choose(rules.kubeai, *rows[:2], rows[3], ask=ask)
        assert after == before or before == 2


def test_kubeai_stays_at_the_first_where_all_are_above_the_bound() -> None:
    home = choose(rules.kubeai, *flights(0, 0, 0, 0))
    assert choose(rules.kubeai, *flights(1, 0, 0, 0)) == home  # 1.25 * 2 / 4 < 1: none may have any


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        # half is cached: exploit, whatever the cost
        ([node(0, matched=5, uncached_tokens=500, load_s=1.4), node(1, uncached_tokens=1000, load_s=1.0)], 0),
        # less than half: the least sum
        ([node(0, matched=4, uncached_tokens=600, load_s=1.4), node(1, uncached_tokens=1000, load_s=1.0)], 1),
        # the most loaded, with more than 1.5 times the least: rebalance
        ([node(0, matched=5, uncached_tokens=500, load_s=1.6), node(1, uncached_tokens=1000, load_s=1.0)], 1),
        # not the most loaded: it stays
        ([node(0, matched=5, uncached_tokens=500, load_s=1.6), node(1, load_s=1.0), node(2, load_s=1.7)], 0),
        # two hold it
        ([node(0, matched=9, uncached_tokens=100, load_s=2.0), node(1, matched=9, uncached_tokens=100, load_s=1.9)], 1),
        # what it evicts and what it computes count
        ([node(0, load_s=1.0, evict_s=0.3, prefill_s=0.1, uncached_tokens=600), node(1, load_s=1.2, prefill_s=0.1)], 1),
        ([node(0, load_s=1.0, evict_s=0.1, prefill_s=0.1, uncached_tokens=600), node(1, load_s=1.2, prefill_s=0.1)], 0),
    ],
)
def test_preble_exploits_what_is_half_cached_and_explores_else(rows: list[Row], chosen: int) -> None:
    assert choose(rules.preble, *rows) == chosen


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        # (0 + 400) * 3 against (0 + 1000) * 1
        ([node(0, uncached_tokens=400, in_flight=2), node(1, uncached_tokens=1000)], 1),
        # (0 + 300) * 3
        ([node(0, uncached_tokens=300, in_flight=2), node(1, uncached_tokens=1000)], 0),
        # (800 + 300) * 1
        ([node(0, uncached_tokens=300, queued_tokens=800), node(1, uncached_tokens=1000)], 1),
    ],
)
def test_lmetric_multiplies_tokens_and_batch(rows: list[Row], chosen: int) -> None:
    assert choose(rules.lmetric, *rows) == chosen
