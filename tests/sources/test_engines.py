"""Engines' metrics pages, as samples."""

from __future__ import annotations

import pytest

from extproc.core.types import LoadSample
from extproc.sources.engines import vllm

PAGE = b"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76400012345e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 5.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 2.0
# HELP vllm:num_requests_waiting_by_reason Number of requests waiting, by reason.
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen3-8B",reason="capacity"} 40.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.375
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27001",num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 123456.0
"""  # noqa: E501 - as the engine writes it

WHOLE = LoadSample(3.0, waiting=2, running=5, kv_usage=0.375, cache_tokens=432_000, started_at_s=1764000123.45)


def test_a_page_gives_a_whole_sample() -> None:
    assert vllm(PAGE, at_s=3.0) == WHOLE


def test_engines_behind_one_page_are_summed_and_their_usage_averaged() -> None:
    second = b"".join(
        line.replace(b'engine="0"', b'engine="1"').replace(b" 5.0", b" 1.0").replace(b" 0.375", b" 0.625") + b"\n"
        for line in PAGE.splitlines()
        if line.startswith(b"vllm:")
    )
    sample = vllm(PAGE + second, at_s=3.0)
    assert (sample.waiting, sample.running, sample.kv_usage) == (4, 6, 0.5)


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (b"vllm:num_requests_waiting{", "waiting"),
        (b"vllm:num_requests_running", "running"),
        (b"vllm:kv_cache_usage_perc", "kv_usage"),
        (b"vllm:cache_config_info", "cache_tokens"),
        (b"process_start_time_seconds", "started_at_s"),
    ],
)
def test_what_the_page_does_not_have_is_none_and_not_nothing(start: bytes, field: str) -> None:
    page = b"\n".join(line for line in PAGE.splitlines() if not line.startswith(start)) + b"\n"
    sample = vllm(page, at_s=3.0)
    assert getattr(sample, field) is None
    assert [name for name in LoadSample.__slots__ if getattr(sample, name) is None] == [field]


def test_an_idle_engine_says_zero_and_not_none() -> None:
    page = PAGE.replace(b" 5.0", b" 0.0").replace(b" 2.0", b" 0.0").replace(b" 0.375", b" 0.0")
    sample = vllm(page, at_s=3.0)
    assert (sample.waiting, sample.running, sample.kv_usage) == (0, 0, 0.0)


def test_the_old_name_of_the_usage_is_read_where_the_new_one_is_missing() -> None:
    old = PAGE.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    assert vllm(old, at_s=3.0) == WHOLE
    both = old + b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    assert vllm(both, at_s=3.0).kv_usage == 0.5


@pytest.mark.parametrize("number", [b"", b"abc", b"1,5", b"--", b"NaN", b"+Inf", b"-Inf"])
def test_a_number_that_is_none_is_no_sample(number: bytes) -> None:
    page = PAGE.replace(b"} 2.0", b"} " + number).replace(b"} 0.375", b"} " + number)
    page = page.replace(b"1.76400012345e+09", number)
    sample = vllm(page, at_s=3.0)
    assert (sample.waiting, sample.kv_usage, sample.started_at_s) == (None, None, None)
    assert sample.running == 5


@pytest.mark.parametrize(
    ("label", "value"),
    [(b"num_gpu_blocks", b"None"), (b"num_gpu_blocks", b"0"), (b"num_gpu_blocks", b"1"), (b"block_size", b"None")],
)
def test_a_cache_of_unknown_or_no_size_is_none(label: bytes, value: bytes) -> None:
    page = PAGE.replace(b'num_gpu_blocks="27001"', b'num_gpu_blocks="%s"' % (value if label[0] == 110 else b"27001"))
    page = page.replace(b'block_size="16"', b'block_size="%s"' % (value if label[0] == 98 else b"16"))
    assert vllm(page, at_s=3.0).cache_tokens is None


def test_usage_stays_within_zero_and_one() -> None:
    assert vllm(PAGE.replace(b" 0.375", b" 1.25"), at_s=3.0).kv_usage == 1.0
    assert vllm(PAGE.replace(b" 0.375", b" -0.5"), at_s=3.0).kv_usage == 0.0


@pytest.mark.parametrize("page", [b"", b"\n", b"<html>502</html>", b"\x00\xff" * 100, b"vllm:num_requests_waiting"])
def test_a_page_of_something_else_is_an_empty_sample(page: bytes) -> None:
    assert vllm(page, at_s=3.0) == LoadSample(3.0)


def test_windows_line_ends_and_timestamps_do_not_matter() -> None:
    assert vllm(PAGE.replace(b"\n", b"\r\n"), at_s=3.0) == WHOLE
    assert vllm(PAGE.replace(b"} 2.0", b"} 2.0 1764000200000"), at_s=3.0) == WHOLE
