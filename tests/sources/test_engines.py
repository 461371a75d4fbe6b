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

WHOLE = LoadSample(3.0, 2, 5, 0.375, cache_tokens=432_000, started_at_s=1764000123.45, block_tokens=16)


def test_a_page_gives_a_whole_sample() -> None:
    assert vllm(PAGE, at_s=3.0) == WHOLE


def behind(size: bytes = b"16", blocks: bytes = b"27001") -> bytes:
    """The lines of another engine behind the same page."""
    lines = (line for line in PAGE.splitlines() if line.startswith(b"vllm:"))
    page = b"".join(line.replace(b'engine="0"', b'engine="1"') + b"\n" for line in lines)
    page = page.replace(b" 5.0", b" 1.0").replace(b" 0.375", b" 0.625")
    return page.replace(b'block_size="16"', b'block_size="%s"' % size).replace(b'"27001"', b'"%s"' % blocks)


def test_engines_behind_one_page_are_summed_and_their_usage_averaged() -> None:
    sample = vllm(PAGE + behind(), at_s=3.0)
    assert (sample.waiting, sample.running, sample.kv_usage) == (4, 6, 0.5)


@pytest.mark.parametrize(
    ("others", "cache_tokens", "block_tokens"),
    [
        ([behind()], 864_000, 16),
        ([behind(), behind(blocks=b"101")], 865_600, 16),
        ([behind(b"32", b"11")], 432_320, None),  # any size would be a lie for one of them
        ([behind(blocks=b"None")], None, 16),  # and so would half of the cache
        ([behind(b"None")], None, None),
        ([behind(blocks=b"1")], 432_000, 16),  # it says that it has none
    ],
)
def test_caches_behind_one_page_add_up_and_blocks_have_a_size_where_all_agree(
    others: list[bytes], cache_tokens: int | None, block_tokens: int | None
) -> None:
    sample = vllm(PAGE + b"".join(others), at_s=3.0)
    assert (sample.cache_tokens, sample.block_tokens) == (cache_tokens, block_tokens)


@pytest.mark.parametrize(
    ("start", "fields"),
    [
        (b"vllm:num_requests_waiting{", ["waiting"]),
        (b"vllm:num_requests_running", ["running"]),
        (b"vllm:kv_cache_usage_perc", ["kv_usage"]),
        (b"vllm:cache_config_info", ["cache_tokens", "block_tokens"]),
        (b"process_start_time_seconds", ["started_at_s"]),
    ],
)
def test_what_the_page_does_not_have_is_none_and_not_nothing(start: bytes, fields: list[str]) -> None:
    page = b"\n".join(line for line in PAGE.splitlines() if not line.startswith(start)) + b"\n"
    sample = vllm(page, at_s=3.0)
    assert [name for name in LoadSample.__slots__ if getattr(sample, name) is None] == fields


def test_an_idle_engine_says_zero_and_not_none() -> None:
    page = PAGE.replace(b" 5.0", b" 0.0").replace(b" 2.0", b" 0.0").replace(b" 0.375", b" 0.0")
    sample = vllm(page, at_s=3.0)
    assert (sample.waiting, sample.running, sample.kv_usage) == (0, 0, 0.0)


def test_the_old_name_of_the_usage_is_read_where_the_new_one_is_missing() -> None:
    old = PAGE.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    assert vllm(old, at_s=3.0) == WHOLE
    both = old + b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    assert vllm(both, at_s=3.0).kv_usage == 0.5


@pytest.mark.parametrize("number", [b"", b"abc", b"1,5", b"--", b"NaN", b"+Inf", b"-Inf", b"1e308", b"-1e308"])
def test_a_number_that_is_none_is_no_sample(number: bytes) -> None:
    page = PAGE.replace(b"} 2.0", b"} " + number).replace(b"} 0.375", b"} " + number)
    page = page.replace(b"1.76400012345e+09", number)
    sample = vllm(page, at_s=3.0)
    assert (sample.waiting, sample.kv_usage, sample.started_at_s) == (None, None, None)
    assert sample.running == 5


@pytest.mark.parametrize(
    ("size", "blocks", "cache_tokens", "block_tokens"),
    [
        (b"16", b"None", None, 16),
        (b"16", b"0", None, 16),
        (b"16", b"1", None, 16),
        (b"None", b"27001", None, None),
        (b"0", b"27001", None, None),
        (b"016", b"27001", 432_000, 16),
        (b"-16", b"27001", None, None),
        (b"9" * 5000, b"27001", None, None),
        (b"16", b"9" * 5000, None, 16),
    ],
)
def test_a_size_that_is_unknown_or_absurd_is_none(
    size: bytes, blocks: bytes, cache_tokens: int | None, block_tokens: int | None
) -> None:
    page = PAGE.replace(b'block_size="16"', b'block_size="%s"' % size).replace(b'"27001"', b'"%s"' % blocks)
    sample = vllm(page, at_s=3.0)
    assert (sample.cache_tokens, sample.block_tokens) == (cache_tokens, block_tokens)


def test_usage_stays_within_zero_and_one() -> None:
    assert vllm(PAGE.replace(b" 0.375", b" 1.25"), at_s=3.0).kv_usage == 1.0
    assert vllm(PAGE.replace(b" 0.375", b" -0.5"), at_s=3.0).kv_usage == 0.0


@pytest.mark.parametrize("page", [b"", b"\n", b"<html>502</html>", b"\x00\xff" * 100, b"vllm:num_requests_waiting"])
def test_a_page_of_something_else_is_an_empty_sample(page: bytes) -> None:
    assert vllm(page, at_s=3.0) == LoadSample(3.0)


def test_windows_line_ends_and_timestamps_do_not_matter() -> None:
    assert vllm(PAGE.replace(b"\n", b"\r\n"), at_s=3.0) == WHOLE
    assert vllm(PAGE.replace(b"} 2.0", b"} 2.0 1764000200000"), at_s=3.0) == WHOLE
