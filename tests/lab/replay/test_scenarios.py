"""What a bad day does: in figures for ours, and for peers that show that the day is bad. Deterministic."""

from __future__ import annotations

from extproc.lab.replay.scenarios import flash_crowd, hot_node_dies, hot_prefix, scale_up, tenant_floods

SEED = 1


def test_a_hot_prefix_is_spread_as_its_work_needs() -> None:
    ours, follower = hot_prefix("ours", SEED), hot_prefix("llm-d", SEED)
    assert follower["max/mean work at 25%"] > 2.0
    assert ours["max/mean work at 25%"] < 1.8
    assert ours["max/mean work at 80%"] < 1.25
    assert ours["TTFT mean at 80%"] < 0.5 * follower["TTFT mean at 80%"]


def test_new_nodes_get_work_and_nobody_waits_for_that() -> None:
    ours, follower = scale_up("ours", SEED), scale_up("llm-d", SEED)
    assert follower["work of the new"] < 0.1
    assert ours["work of the new"] > 0.15
    assert ours["p95 after"] <= 1.05 * ours["p95 before"]


def test_a_flash_crowd_is_spread() -> None:
    ours, follower = flash_crowd("ours", SEED), flash_crowd("llm-d", SEED)
    assert follower["crowd p95"] > 10.0
    assert ours["crowd p95"] < 5.0
    assert ours["chats p95 during"] < 0.1 * follower["chats p95 during"]


def test_when_a_hot_node_dies_its_sessions_go_to_several() -> None:
    ours, balanced = hot_node_dies("ours", SEED), hot_node_dies("least-request", SEED)
    assert ours["sessions"] > 50
    assert ours["errors"] == 0
    assert ours["on nodes"] == 3
    assert ours["most on one"] < 0.6
    assert ours["p99 of theirs after"] < 0.5 * balanced["p99 of theirs after"]


def test_one_tenants_flood_costs_the_others_little_of_what_is_warm() -> None:
    ours, balanced = tenant_floods("ours", SEED), tenant_floods("least-request", SEED)
    assert balanced["p95 during"] > 3 * balanced["p95 before"]
    assert ours["p95 during"] < balanced["p95 during"]
    assert ours["hit rate during"] > 0.7
    assert ours["hit rate during"] > balanced["hit rate during"] + 0.1
