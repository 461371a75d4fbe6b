"""What the simulated node counts, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from extproc.lab.engine import Engine

LABELS = ("engine", "model_name")
# vLLM's own buckets of vllm:time_to_first_token_seconds
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM keeps all label sets of lora_requests_info; here the oldest of more than these goes.
MAX_LORA_SETS = 64


@dataclass(frozen=True, slots=True)
class RankMeters:
    """The counters of one data-parallel rank."""

    queries: Counter
    hits: Counter
    prompt_tokens: Counter
    cached_tokens: Counter
    generated: Counter
    ttft_s: Histogram
    finished: dict[str, Counter]


class Meters:
    """A registry of its own; a restart makes a new one."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        model: str,
        blocks: int,
        block_tokens: int,
        started_at_s: float,
        max_loras: int | None,
    ) -> None:
        """`started_at_s`: wall clock. `max_loras`: None where the model has no adapters."""
        self._registry = registry = CollectorRegistry()
        self._engines = engines
        self._max_loras = max_loras
        self._lora_sets: dict[tuple[str, str, str], None] = {}
        ranks = [(str(rank), model) for rank in range(len(engines))]
        Gauge(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", registry=registry
        ).set(started_at_s)

        def gauge(name: str, text: str, value: Callable[[Engine], float]) -> None:
            made = Gauge(f"vllm:{name}", text, LABELS, registry=registry)
            for values, engine in zip(ranks, engines, strict=True):
                made.labels(*values).set_function(lambda engine=engine: value(engine))  # type: ignore[misc]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*LABELS, *more), registry=registry)

        gauge("num_requests_running", "Number of requests in model execution batches.", lambda each: each.running)
        gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda each: each.waiting)
        gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            lambda each: each.cache.in_use / each.cache.usable,
        )
        queries = counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.")
        hits = counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        cached_tokens = counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        generated = counter("generation_tokens", "Number of generation tokens processed.")
        finished = counter("request_success", "Count of successfully processed requests.", "finished_reason")
        ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            LABELS,
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.ranks = [
            RankMeters(
                queries.labels(*values),
                hits.labels(*values),
                prompt_tokens.labels(*values),
                cached_tokens.labels(*values),
                generated.labels(*values),
                ttft.labels(*values),
                {reason: finished.labels(*values, reason) for reason in ("stop", "length", "abort", "error")},
            )
            for values in ranks
        ]
        config = {
            "block_size": str(block_tokens),
            "num_gpu_blocks": str(blocks),
            "kv_cache_size_tokens": str(blocks * block_tokens),
            "enable_prefix_caching": "True",
        }
        info = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", ("engine", *config), registry=registry
        )
        for rank, _ in ranks:
            info.labels(engine=rank, **config).set(1)
        if max_loras is not None:
            self._loras = Gauge(
                "vllm:lora_requests_info",
                "Running stats on lora requests.",
                ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                registry=registry,
            )

    def page(self) -> bytes:
        """GET /metrics. The adapters now in use get the time as their value; earlier ones stay, with theirs."""
        if self._max_loras is not None:
            running, waiting = (
                ",".join(sorted({lora for engine in self._engines for lora in engine.adapters(stage)}))
                for stage in ("running", "waiting")
            )
            values = (str(self._max_loras), running, waiting)
            self._loras.labels(*values).set(time.time())
            self._lora_sets.pop(values, None)
            self._lora_sets[values] = None
            if len(self._lora_sets) > MAX_LORA_SETS:
                oldest = next(iter(self._lora_sets))
                del self._lora_sets[oldest]
                self._loras.remove(*oldest)
        return generate_latest(self._registry)
