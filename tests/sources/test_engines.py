"""Engines' metrics pages, as samples."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.types import LoadSample
from extproc.sources.engines import ENGINES, VLLM, Page

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
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7640001e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sqlbot,chat",waiting_lora_adapters="zh,sqlbot"} 1.7640003e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7640002e+09
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 123456.0
vllm:prefix_cache_queries_created{engine="0",model_name="Qwen/Qwen3-8B"} 1.764e+09
vllm:prefix_cache_hits_total{engine="0",model_name="Qwen/Qwen3-8B"} 65432.0
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 123400.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="Qwen/Qwen3-8B",source="local_compute"} 58024.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="Qwen/Qwen3-8B"} 40.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="Qwen/Qwen3-8B"} 2.0
"""  # noqa: E501 - as the engine writes it

WHOLE = LoadSample(
    at_s=3.0,
    waiting=2,
    running=5,
    kv_usage=0.375,
    cache_tokens=432_000,
    started_at_s=1764000123.45,
    block_tokens=16,
    prefix_queries=123456.0,
    prefix_hits=65432.0,
    prompt_tokens=123400.0,
    loras=("chat", "sqlbot", "zh"),
    max_loras=4,
)


def read(page: bytes, *, at_s: float = 3.0, rank: int | None = None) -> LoadSample:
    return Page(page).sample(at_s=at_s, rank=rank)


def told(sample: LoadSample) -> dict[str, object]:
    """What is not None, but for the time."""
    values = {each.name: getattr(sample, each.name) for each in fields(sample)}
    return {name: value for name, value in values.items() if value is not None and name != "at_s"}


def test_a_page_gives_a_whole_sample() -> None:
    assert read(PAGE, at_s=3.0) == WHOLE


def behind(size: bytes = b"16", blocks: bytes = b"27001") -> bytes:
    """The lines of another engine behind the same page."""
    lines = (line for line in PAGE.splitlines() if line.startswith(b"vllm:"))
    page = b"".join(line.replace(b'engine="0"', b'engine="1"') + b"\n" for line in lines)
    page = page.replace(b" 5.0", b" 1.0").replace(b" 0.375", b" 0.625")
    return page.replace(b'block_size="16"', b'block_size="%s"' % size).replace(b'"27001"', b'"%s"' % blocks)


def test_engines_behind_one_page_are_summed_and_their_usage_averaged() -> None:
    sample = read(PAGE + behind(), at_s=3.0)
    assert (sample.waiting, sample.running, sample.kv_usage) == (4, 6, 0.5)
    assert (sample.prefix_queries, sample.prefix_hits, sample.prompt_tokens) == (246912.0, 130864.0, 246800.0)


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
    sample = read(PAGE + b"".join(others), at_s=3.0)
    assert (sample.cache_tokens, sample.block_tokens) == (cache_tokens, block_tokens)


@pytest.mark.parametrize(
    ("start", "fields"),
    [
        (b"vllm:num_requests_waiting{", ["waiting"]),
        (b"vllm:num_requests_running", ["running"]),
        (b"vllm:kv_cache_usage_perc", ["kv_usage"]),
        (b"vllm:cache_config_info", ["cache_tokens", "block_tokens"]),
        (b"process_start_time_seconds", ["started_at_s"]),
        (b"vllm:prefix_cache_queries_total", ["prefix_queries"]),
        (b"vllm:prefix_cache_hits_total", ["prefix_hits"]),
        (b"vllm:prompt_tokens_total", ["prompt_tokens"]),
        (b"vllm:lora_requests_info", ["loras", "max_loras"]),
    ],
)
def test_what_the_page_does_not_have_is_none_and_not_nothing(start: bytes, fields: list[str]) -> None:
    page = b"\n".join(line for line in PAGE.splitlines() if not line.startswith(start)) + b"\n"
    sample = read(page, at_s=3.0)
    assert [name for name in LoadSample.__slots__ if getattr(sample, name) is None] == fields


def test_an_idle_engine_says_zero_and_not_none() -> None:
    page = PAGE.replace(b" 5.0", b" 0.0").replace(b" 2.0", b" 0.0").replace(b" 0.375", b" 0.0")
    sample = read(page, at_s=3.0)
    assert (sample.waiting, sample.running, sample.kv_usage) == (0, 0, 0.0)


def test_the_old_name_of_the_usage_is_read_where_the_new_one_is_missing() -> None:
    old = PAGE.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    assert read(old, at_s=3.0) == WHOLE
    both = old + b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    assert read(both, at_s=3.0).kv_usage == 0.5


@pytest.mark.parametrize("number", [b"", b"abc", b"1,5", b"--", b"NaN", b"+Inf", b"-Inf", b"1e308", b"-1e308"])
def test_a_number_that_is_none_is_no_sample(number: bytes) -> None:
    page = PAGE.replace(b"} 2.0", b"} " + number).replace(b"} 0.375", b"} " + number)
    page = page.replace(b"1.76400012345e+09", number)
    sample = read(page, at_s=3.0)
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
        (b"16.5", b"27001", None, None),
        (b"9" * 5000, b"27001", None, None),
        (b"16", b"9" * 5000, None, 16),
    ],
)
def test_a_size_that_is_unknown_or_absurd_is_none(
    size: bytes, blocks: bytes, cache_tokens: int | None, block_tokens: int | None
) -> None:
    page = PAGE.replace(b'block_size="16"', b'block_size="%s"' % size).replace(b'"27001"', b'"%s"' % blocks)
    sample = read(page, at_s=3.0)
    assert (sample.cache_tokens, sample.block_tokens) == (cache_tokens, block_tokens)


def test_usage_stays_within_zero_and_one() -> None:
    assert read(PAGE.replace(b" 0.375", b" 1.25"), at_s=3.0).kv_usage == 1.0
    assert read(PAGE.replace(b" 0.375", b" -0.5"), at_s=3.0).kv_usage == 0.0


@pytest.mark.parametrize("page", [b"", b"\n", b"<html>502</html>", b"\x00\xff" * 100, b"vllm:num_requests_waiting"])
def test_a_page_of_something_else_is_an_empty_sample(page: bytes) -> None:
    assert read(page, at_s=3.0) == LoadSample(3.0)


def test_windows_line_ends_and_timestamps_do_not_matter() -> None:
    assert read(PAGE.replace(b"\n", b"\r\n"), at_s=3.0) == WHOLE
    assert read(PAGE.replace(b"} 2.0", b"} 2.0 1764000200000"), at_s=3.0) == WHOLE


@pytest.mark.parametrize(
    ("tokens", "cache_tokens"), [(b"200000", 200_000), (b"999999", 432_000), (b"None", 432_000), (b"0", None)]
)
def test_a_cache_holds_no_more_than_its_blocks_and_no_more_than_it_says(tokens: bytes, cache_tokens: int) -> None:
    """Layers of several kinds share the blocks of one pool, so that a token takes more than one."""
    page = PAGE.replace(b',num_gpu_blocks="', b',kv_cache_size_tokens="%s",num_gpu_blocks="' % tokens)
    assert read(page).cache_tokens == cache_tokens


# ---- ranks ----


def test_a_rank_is_told_of_its_own_lines_alone() -> None:
    page = PAGE + behind(b"32", b"11")
    assert read(page, rank=0) == WHOLE
    sample = read(page, rank=1)
    assert (sample.waiting, sample.running, sample.kv_usage) == (2, 1, 0.625)
    assert (sample.cache_tokens, sample.block_tokens, sample.started_at_s) == (320, 32, 1764000123.45)
    assert Page(page).counters(rank=1) == Page(PAGE).counters()


def test_of_a_rank_that_is_not_there_nothing_is_known_but_what_is_true_of_all() -> None:
    sample = read(PAGE, rank=7)
    assert told(sample).keys() == {"started_at_s", "loras", "max_loras"}


def test_what_has_no_rank_is_a_size_of_every_rank_and_a_count_of_none() -> None:
    page = PAGE.replace(b'engine="0",', b"")
    sample = read(page, rank=1)
    assert (sample.block_tokens, sample.cache_tokens) == (16, 432_000)
    assert (sample.waiting, sample.prompt_tokens) == (None, None)
    assert read(page) == WHOLE


def test_a_rank_is_not_one_whose_number_begins_with_it() -> None:
    page = PAGE.replace(b'engine="0"', b'engine="12"')
    assert read(page, rank=1).waiting is None
    assert read(page, rank=12).waiting == 2


# ---- adapters ----


def test_no_adapter_is_none_loaded_and_no_line_is_not_known() -> None:
    lines = [line for line in PAGE.splitlines() if not re.match(rb'vllm:lora.*"(old|sqlbot,chat)"', line)]
    assert read(b"\n".join(lines)).loras == ()
    assert read(b"\n".join(line for line in lines if b"lora" not in line)).loras is None


def test_names_of_adapters_may_be_of_any_script_and_are_not_endless() -> None:
    page = PAGE.replace(b'"sqlbot,chat"', '"ü-\N{SNOWMAN},a\\"b"'.encode())
    assert read(page).loras == ('a\\"b', "sqlbot", "zh", "ü-\N{SNOWMAN}")
    many = b",".join(b"a%04d" % i for i in range(5000))
    assert len(read(PAGE.replace(b"sqlbot,chat", many)).loras or ()) == 1024
    assert read(PAGE.replace(b"sqlbot,chat", b"\xff")).loras == ("sqlbot", "zh", "\N{REPLACEMENT CHARACTER}")


# ---- other engines, and older names ----

OLD_VLLM = b"""# HELP vllm:gpu_prefix_cache_queries_total Prefix cache queries, in terms of number of queried blocks.
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 60.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1.0
"""

SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 7.0
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 7.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="5",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.25
sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 471258.0
sglang:page_size{engine_type="unified",model_name="m",tp_rank="0"} 64.0
sglang:num_pages{engine_type="unified",model_name="m",tp_rank="0"} 7363.0
sglang:prompt_tokens_total{model_name="m"} 5000.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1200.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 300.0
sglang:num_requests_total{model_name="m"} 50.0
"""

SGLANG_RANKS = b"""sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 1.0
sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 4.0
sglang:num_running_reqs{dp_rank="1",tp_rank="3"} 4.0
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 0.75
sglang:max_total_num_tokens{dp_rank="0"} 1000.0
sglang:max_total_num_tokens{dp_rank="1"} 1000.0
sglang:cache_config_info{dp_rank="0",num_pages="63",page_size="16"} 1.0
sglang:cache_config_info{dp_rank="1",num_pages="63",page_size="16"} 1.0
sglang:cached_tokens_total{cache_source="total",model_name="m"} 1500.0
"""

TRT_LLM = b"""trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 4.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 2.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000.0
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m"} 620.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="m"} 0.75
trtllm_kv_cache_reused_blocks_total{engine_type="trtllm",model_name="m"} 30.0
trtllm_kv_cache_missed_blocks_total{engine_type="trtllm",model_name="m"} 10.0
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 1300.0
trtllm_request_success_total{engine_type="trtllm",finished_reason="stop",model_name="m"} 12.0
"""

TRITON = b"""nv_inference_request_success{model="tensorrt_llm",version="1"} 250
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 6
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 75
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 100
"""

LLAMA_CPP = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
llamacpp:prompt_tokens_total 96641
llamacpp:tokens_predicted_total 23210
llamacpp:kv_cache_usage_ratio 0.5
llamacpp:requests_processing 2
llamacpp:requests_deferred 1
"""

TGI = b"""# TYPE tgi_request_input_length histogram
tgi_request_input_length_bucket{le="64"} 3
tgi_request_input_length_sum 8123
tgi_request_input_length_count 44
tgi_batch_current_size 4
tgi_queue_size 7
tgi_request_count 44
"""


@pytest.mark.parametrize(
    ("page", "engine", "expected"),
    [
        (
            OLD_VLLM,
            "vllm",
            {"waiting": 1, "running": 3, "kv_usage": 0.5, "cache_tokens": 1600, "block_tokens": 16}
            | {"prefix_queries": 1600.0, "prefix_hits": 960.0},
        ),
        (
            OLD_VLLM.replace(b"queried blocks", b"queried tokens"),
            "vllm",
            {"waiting": 1, "running": 3, "kv_usage": 0.5, "cache_tokens": 1600, "block_tokens": 16}
            | {"prefix_queries": 100.0, "prefix_hits": 60.0},
        ),
        (
            SGLANG,
            "sglang",
            {"waiting": 3, "running": 7, "kv_usage": 0.25, "cache_tokens": 471_232, "block_tokens": 64}
            | {"prefix_queries": 5000.0, "prefix_hits": 1500.0, "prompt_tokens": 5000.0},
        ),
        (
            SGLANG_RANKS,
            "sglang",
            {"running": 5, "kv_usage": 0.5, "cache_tokens": 2000, "block_tokens": 16, "prefix_hits": 1500.0},
        ),
        (
            TRT_LLM,
            "trt-llm",
            {"waiting": 2, "running": 4, "kv_usage": 0.62, "cache_tokens": 32_000, "block_tokens": 32}
            | {"prefix_queries": 1280.0, "prefix_hits": 960.0, "prompt_tokens": 1300.0},
        ),
        (
            TRITON,
            "triton",
            {"waiting": 6, "running": 5, "kv_usage": 0.25, "cache_tokens": 6400, "block_tokens": 64},
        ),
        (LLAMA_CPP, "llama.cpp", {"waiting": 1, "running": 2, "kv_usage": 0.5}),
        (TGI, "tgi", {"waiting": 7, "running": 4, "prompt_tokens": 8123.0}),
    ],
)
def test_each_engine_is_known_by_its_names_and_read_by_its_table(
    page: bytes, engine: str, expected: dict[str, object]
) -> None:
    picked = Page(page)
    assert picked.engine is not None
    assert picked.engine.name == engine
    assert told(picked.sample(at_s=3.0)) == expected
    assert told(Page(page, VLLM).sample(at_s=3.0)) == expected  # though it was another's page the last time


def test_ranks_of_sglang_are_told_apart_and_their_tensor_parallel_ranks_are_not_summed() -> None:
    sample = read(SGLANG_RANKS, rank=1)
    assert (sample.running, sample.kv_usage, sample.cache_tokens, sample.block_tokens) == (4, 0.75, 1000, 16)
    assert sample.prefix_hits is None  # whose they are is not said


def test_a_sum_of_sources_is_not_added_to_them() -> None:
    page = SGLANG + b'sglang:cached_tokens_total{cache_source="total",model_name="m"} 1500.0\n'
    assert read(page).prefix_hits == 1500.0


def test_the_share_that_triton_tells_goes_before_one_of_blocks() -> None:
    page = TRITON + b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="a"} 0.75\n'
    assert read(page).kv_usage == 0.75


def test_blocks_of_unknown_size_are_no_tokens() -> None:
    page = TRT_LLM.replace(b"trtllm_kv_cache_tokens_per_block", b"something_else")
    sample = read(page)
    assert (sample.prefix_hits, sample.prefix_queries, sample.cache_tokens) == (None, None, None)
    assert sample.waiting == 2


@pytest.mark.parametrize("page", [PAGE, SGLANG, TRT_LLM, TRITON, LLAMA_CPP, TGI])
def test_every_engine_has_something_that_only_grows(page: bytes) -> None:
    assert all(counter.lines and counter.value > 0 for counter in Page(page).counters())
    assert Page(page).counters()


def test_requests_that_ended_are_counted_over_all_reasons() -> None:
    assert [tuple(each) for each in Page(PAGE).counters()] == [(1, 123400.0), (2, 42.0)]
    assert [tuple(each) for each in Page(b"vllm:num_requests_running 1.0\n").counters()] == [(0, 0), (0, 0)]


def test_what_is_looked_for_can_be_asked_for_by_name() -> None:
    names = Page(PAGE).names()
    assert {b"process_start_time_seconds", b"vllm:num_requests_waiting", b"vllm:cache_config_info"} <= names
    assert b"vllm:prompt_tokens_by_source_total" not in names
    kept = b"".join(line for line in PAGE.splitlines(keepends=True) if re.split(rb"[ {]", line)[0] in names)
    assert read(kept) == WHOLE
    assert Page(b"process_start_time_seconds 1.0\n").names() == frozenset()


# ---- anything ----


@settings(deadline=None)
@given(st.data())
def test_a_page_that_was_tampered_with_raises_nothing_and_tells_nothing_impossible(data: st.DataObject) -> None:
    page = bytearray(data.draw(st.sampled_from([PAGE, OLD_VLLM, SGLANG, SGLANG_RANKS, TRT_LLM, TRITON, TGI])))
    piece = st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"NaN", b"-1", b"1e400", b'"', b"}", b"{", b"\n", b" ", b'engine="1"', b"9" * 400, b"\\"]),
    )
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(page)))
        page[at : at + data.draw(st.integers(0, 20))] = data.draw(piece)
    rank = data.draw(st.sampled_from([None, 0, 1]))
    picked = Page(bytes(page), data.draw(st.sampled_from([None, *ENGINES])))
    sample = picked.sample(at_s=3.0, rank=rank)
    assert sample.kv_usage is None or 0.0 <= sample.kv_usage <= 1.0
    assert sample.block_tokens is None or sample.block_tokens >= 1
    assert sample.cache_tokens is None or sample.cache_tokens >= 1
    assert sample.max_loras is None or sample.max_loras >= 1
    assert all(isinstance(each.value, float | int) for each in picked.counters(rank=rank))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_are_a_page_or_none(page: bytes) -> None:
    read(page)
    read(b"vllm:num_requests_waiting" + page)


def test_a_page_of_one_endless_line_takes_no_longer_than_one_of_many() -> None:
    """As long as it takes is what the test has; a pattern that backtracks would need hours."""
    for end in (b"} " * 500_000, b"} 1 2" * 200_000 + b"}", b"{" * 1_000_000, b"9" * 1_000_000):
        assert read(b"vllm:num_requests_waiting{" + end).waiting is None


CAPTURES = Path(__file__).parents[3] / "shared" / "lab" / "captures"


def test_the_pages_of_a_real_server_are_read_where_they_are_there() -> None:
    expected = {
        "vllm_metrics.txt": (0, 1, 32736, 32, 32896.0, 17888.0, ("sqlbot",)),
        "vllm_metrics_in_flight.txt": (4, 4, 32736, 32, 31084.0, 16128.0, ()),
    }
    for name, values in expected.items():
        if not (CAPTURES / name).exists():
            continue
        sample = read((CAPTURES / name).read_bytes())
        assert sample.prefix_queries == sample.prompt_tokens
        assert (
            sample.waiting,
            sample.running,
            sample.cache_tokens,
            sample.block_tokens,
            sample.prefix_queries,
            sample.prefix_hits,
            sample.loras,
        ) == values
        assert sample.max_loras == 1
    names = CAPTURES / "sglang_metrics.tsv"
    if names.exists():
        sglang = next(each for each in ENGINES if each.name == "sglang")
        there = {line.split("\t")[0].encode() for line in names.read_text().splitlines()}
        assert set(sglang.names()) - there == {b"sglang:cache_config_info"}  # an older name
