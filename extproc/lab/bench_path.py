"""What an ext_proc server adds to a request: the bare route, the trivial server and ours, in turns on one Envoy."""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

from extproc.lab.bench_envoy import NODE_PORTS, gateway, upstreams
from extproc.lab.envoy_config import write_config
from extproc.lab.processes import Child, Processes, envoy_binary, free_ports, http_ok, stopped_at_the_end
from extproc.lab.wire_load import Conversation, Load, closed_loop, conversations, open_loop, percentile

Variant = Literal["bare", "trivial", "ours"]
Kind = Literal["one", "steady", "saturated"]
VARIANTS: tuple[Variant, ...] = ("bare", "trivial", "ours")
KINDS: tuple[Kind, ...] = ("one", "steady", "saturated")

CONNECTIONS = 16
RATE = 300.0
CONVERSATIONS_PER_CONNECTION = 4  # prebuilt: 64 MB of them at 1 MB each
MODEL = "tiny"
TRIVIAL_CLUSTER = "node-2"
LOOP_DELAY = "kvaffinity_loop_delay_seconds"
# One worker: with more, which worker a connection falls to is chance, and 16 of them spread unevenly differently each
# time. And two cores are all there are on a small machine: the server and the upstreams need the other one.
CONCURRENCY = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: `rounds` times, each size, each kind of load, and then the three variants one by one."""

    sizes: tuple[int, ...]  # bytes of a request's body
    rounds: int
    warm_s: float
    seconds: float  # of each measurement

    def __len__(self) -> int:
        return self.rounds * len(self.sizes) * len(KINDS) * len(VARIANTS)


@dataclass(slots=True)
class Run:
    """One measurement. CPU is that of a whole process, user and system time, divided by the requests answered."""

    size: int
    variant: Variant
    kind: Kind
    requests: int
    p50_s: float
    p99_s: float
    requests_per_s: float
    server_cpu_s: float  # per request; the ext_proc server (0.0: there is none)
    envoy_cpu_s: float  # per request; the Envoy under test
    generator_cpu_share: float  # of one core
    unsent: int  # at a steady rate: due, but no connection was free in time
    errors: dict[str, int]
    failed_open: int  # answered, but by the fallback route or by another node than was asked for
    locality: float = 0.0  # mean share of the prompt that our map matched on the chosen node
    loop_delays: dict[float, float] = field(default_factory=dict)  # how many at most so late: bucket's bound, count

    @property
    def sustained(self) -> bool:
        """The rate was kept up; otherwise the queue only grew, and its length says nothing."""
        return not self.unsent and self.requests_per_s >= 0.95 * RATE

    @property
    def clean(self) -> bool:
        """Every request was answered, by the node that the server chose."""
        return not self.errors and not self.failed_open


class Bench:
    """The running processes: the upstreams, the Envoy under test, the trivial server, and ours."""

    def __init__(self, processes: Processes) -> None:
        ports = free_ports(len(NODE_PORTS) + len(VARIANTS) + 5)
        nodes = {name: ports.pop() for name in NODE_PORTS}
        self._listeners: dict[str, int] = {variant: ports.pop() for variant in VARIANTS}
        servers = {"trivial": ports.pop(), "ours": ports.pop()}
        self._admin, self._metrics, upstream_admin = ports
        self._children: dict[str, Child] = {}

        def start(name: str, argv: Sequence[str], ready: Callable[[], bool]) -> None:
            self._children[name] = child = processes.start(name, argv)
            processes.wait_until(child, ready)

        def envoy(name: str, config: dict[str, Any], admin: int) -> None:
            path = write_config(config, processes.log_dir / f"{name}.yaml")
            argv = [envoy_binary(), "-c", str(path), "--concurrency", str(CONCURRENCY), "--use-dynamic-base-id"]
            start(name, [*argv, "--log-level", "warning"], http_ok(f"http://127.0.0.1:{admin}/ready"))

        envoy("upstreams", upstreams(nodes, upstream_admin), upstream_admin)
        settings = processes.log_dir / "kvaffinity.toml"
        settings.write_text(_server_config(nodes, servers["ours"], self._metrics))
        python = sys.executable
        start(
            "ours",
            [python, "-m", "extproc", "serve", "--config", str(settings)],
            http_ok(f"http://127.0.0.1:{self._metrics}/healthz"),
        )
        envoy("gateway", gateway(nodes, self._listeners, servers, self._admin), self._admin)
        start(
            "trivial",
            [python, "-m", "extproc.lab.trivial", "--port", str(servers["trivial"]), "--cluster", TRIVIAL_CLUSTER],
            lambda: all(self._healthy(name) for name in servers),
        )

    def cpu_s(self) -> float:
        """What this process and all its children have used."""
        own = os.times()
        return own.user + own.system + sum(cpu_s(child.process.pid) for child in self._children.values())

    def measure(self, plan: Plan, step: Callable[[str], None]) -> list[Run]:
        """Every run of the plan; `step` is told before each of them what comes."""
        runs = []
        count = CONNECTIONS * CONVERSATIONS_PER_CONNECTION
        built = {size: conversations(count, size, model=MODEL) for size in plan.sizes}
        for number in range(plan.rounds):
            for size, each in built.items():
                turns = [each[i::CONNECTIONS] for i in range(CONNECTIONS)]
                for kind in KINDS:
                    for variant in VARIANTS:
                        step(f"round {number + 1}: {size // 1000} KB, {kind}, {variant}")
                        self._load(variant, kind, turns, plan.warm_s)
                        runs.append(self._run(size, variant, kind, turns, plan.seconds))
        return runs

    def _load(self, variant: Variant, kind: Kind, turns: Sequence[Sequence[Conversation]], seconds: float) -> Load:
        port = self._listeners[variant]
        if kind == "steady":
            return open_loop(port, turns, seconds=seconds, rate=RATE)
        return closed_loop(port, turns[:1] if kind == "one" else turns, seconds=seconds)

    def _run(
        self, size: int, variant: Variant, kind: Kind, turns: Sequence[Sequence[Conversation]], seconds: float
    ) -> Run:
        before, cpu_before = self._counters(variant), self._cpu(variant)
        load = self._load(variant, kind, turns, seconds)
        cpu = {name: after - cpu_before[name] for name, after in self._cpu(variant).items()}
        counted = {name: after - before.get(name, 0.0) for name, after in self._counters(variant).items()}
        requests = max(len(load.latencies_s), 1)
        failed_open = max(astray(load.routes, variant), round(counted.get("failure_mode_allowed", 0.0)))
        if variant != "bare" and (asked := counted["streams_started"]) < len(load.latencies_s):
            load.errors["ext_proc not asked"] += len(load.latencies_s) - round(asked)
        decided = counted.get("kvaffinity_locality_count", 0.0)
        latencies_s = load.latencies_s or [math.nan]
        return Run(
            size,
            variant,
            kind,
            len(load.latencies_s),
            percentile(latencies_s, 0.5),
            percentile(latencies_s, 0.99),
            load.requests_per_s,
            cpu.get(variant, 0.0) / requests,
            cpu["gateway"] / requests,
            load.cpu_s / load.elapsed_s,
            load.unsent,
            dict(load.errors),
            failed_open,
            counted["kvaffinity_locality_sum"] / decided if decided else 0.0,
            {float(name[len(LOOP_DELAY) :]): count for name, count in counted.items() if name.startswith(LOOP_DELAY)},
        )

    def _counters(self, variant: Variant) -> dict[str, float]:
        """Envoy's ext_proc counters of the variant's listener; of ours, its locality and its loop's delays as well."""
        if variant == "bare":
            return {}
        prefix = f"http.{variant}.ext_proc."
        page = _get(f"http://127.0.0.1:{self._admin}/stats?filter=^{prefix}")
        counters = dict(line.removeprefix(prefix).split(": ") for line in page.splitlines())
        found = {name: float(value) for name, value in counters.items()}
        if variant == "ours":
            for family in text_string_to_metric_families(_get(f"http://127.0.0.1:{self._metrics}/metrics")):
                for sample in family.samples:
                    if sample.name == f"{LOOP_DELAY}_bucket":
                        found[LOOP_DELAY + sample.labels["le"]] = sample.value
                    elif sample.name in ("kvaffinity_locality_sum", "kvaffinity_locality_count"):
                        found[sample.name] = sample.value
        return found

    def _cpu(self, variant: Variant) -> dict[str, float]:
        return {name: cpu_s(self._children[name].process.pid) for name in {"gateway", variant} - {"bare"}}

    def _healthy(self, cluster: str) -> bool:
        page = _get(f"http://127.0.0.1:{self._admin}/stats?filter=^cluster.{cluster}.membership_healthy$")
        return page.strip().endswith(": 1")


def run(plan: Plan, step: Callable[[str], None]) -> tuple[list[Run], float]:
    """Start everything, measure, stop everything; and how many cores other programs used meanwhile, on average."""
    with tempfile.TemporaryDirectory(prefix="kvaffinity-bench-") as made, stopped_at_the_end(Path(made)) as processes:
        bench = Bench(processes)
        begun_s, all_s, own_s = time.perf_counter(), busy_s(), bench.cpu_s()
        runs = bench.measure(plan, step)
        others_s = (busy_s() - all_s) - (bench.cpu_s() - own_s)
        return runs, max(0.0, others_s / (time.perf_counter() - begun_s))


def busy_s() -> float:
    """CPU time that the machine has used since it started, all cores; what a hypervisor took away included."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time that a process has used, all threads, in steps of 10 ms. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loop_delay_s(runs: Sequence[Run], share: float) -> float:
    """A percentile of the loop's delay over the runs, from their histograms; not a number when nothing was seen."""
    buckets: Counter[float] = Counter()
    for run in runs:
        buckets.update(run.loop_delays)
    return interpolated(buckets, share) if buckets else math.nan


def interpolated(buckets: Mapping[float, float], share: float) -> float:
    """A percentile of a histogram's cumulative buckets, linear inside its bucket; the last finite bound beyond it."""
    total, below, low = max(buckets.values()), 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= share * total:
            return low if bound == math.inf else low + (bound - low) * (share * total - below) / (count - below)
        below, low = count, bound
    return low


def median(runs: Sequence[Run], size: int, variant: Variant, kind: Kind, of: Callable[[Run], float]) -> float:
    """The median of a figure over the rounds."""
    return statistics.median(of(run) for run in _cell(runs, size, variant, kind))


def compared(
    runs: Sequence[Run],
    size: int,
    kind: Kind,
    of: Callable[[Run], float],
    how: Callable[[float, float, float], float],
) -> float:
    """The median over the rounds of `how(bare, trivial, ours)`: neighbours in time are compared with each other."""
    cells = [_cell(runs, size, variant, kind) for variant in VARIANTS]
    return statistics.median(how(of(bare), of(trivial), of(ours)) for bare, trivial, ours in zip(*cells, strict=True))


def _cell(runs: Sequence[Run], size: int, variant: Variant, kind: Kind) -> list[Run]:
    return [run for run in runs if (run.size, run.variant, run.kind) == (size, variant, kind)]


def astray(routes: Counter[bytes], variant: Variant) -> int:
    """Answers that did not come from the node that the server chose: x-route is "cluster>node"."""
    if variant == "bare":
        return 0
    right = {b"%s>%s" % (name, name) for name in map(str.encode, NODE_PORTS)}
    if variant == "trivial":
        right = {b"%s>%s" % (TRIVIAL_CLUSTER.encode(), TRIVIAL_CLUSTER.encode())}
    return sum(count for route, count in routes.items() if route not in right)


def _server_config(nodes: dict[str, int], port: int, metrics_port: int) -> str:
    lines = ["[server]", f'listen = "127.0.0.1:{port}"', f'metrics_listen = "127.0.0.1:{metrics_port}"']
    lines += ["[[models]]", f'name = "{MODEL}"']
    for name, node_port in nodes.items():
        lines += ["[[models.nodes]]", f'name = "{name}"', f'address = "127.0.0.1:{node_port}"', f'cluster = "{name}"']
    return "\n".join(lines) + "\n"


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return str(answer.read().decode())
