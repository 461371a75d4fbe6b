"""`kvaffinity demo`: one load on four simulated nodes, by Envoy's round robin and by kvaffinity, side by side."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.lab.envoy_config import Config, load_config, write_config
from extproc.lab.load import Session, Shape, Summary, conversations, replay, summarize
from extproc.lab.processes import Processes, envoy_binary, free_ports, http_ok, stopped_at_the_end

MODEL = "tiny"
# The ports in envoy/*.yaml: ext_proc, Envoy's listener, its admin page, the nodes.
EXT_PROC, LISTENER, ADMIN, NODES = 9002, 10000, 9901, (8001, 8002, 8003, 8004)
SHAPE = Shape()
# A node's cache holds 24,576 tokens: about all system prompts of the load, but not what its sessions say besides.
BLOCKS, BLOCK_TOKENS, PREFILL_TOKENS_PER_S, DECODE_MS = 1536, 16, 8000, 10
ENVOY_CONFIG = Path(__file__).parents[2] / "envoy" / "cluster-header.yaml"


@click.command()
@click.option("--seed", default=1, show_default=True, help="Of the load: the same seed, the same conversations.")
@click.option(
    "--envoy-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=ENVOY_CONFIG,
    show_default="envoy/cluster-header.yaml",
    help="What Envoy runs with beside kvaffinity.",
)
@click.option("--keep-logs", is_flag=True, help="Keep the configurations and what the processes print; say where.")
def demo(seed: int, envoy_config: Path, keep_logs: bool) -> None:
    """Replay the same conversations through Envoy's round robin and through kvaffinity, and compare."""
    console = Console()
    sessions = conversations(SHAPE, seed)
    console.print(
        f"{len(sessions)} conversations of {SHAPE.turns} turns share {SHAPE.groups} system prompts of "
        f"{SHAPE.system_tokens[0]:,} to {SHAPE.system_tokens[1]:,} tokens. {len(NODES)} simulated nodes compute "
        f"{PREFILL_TOKENS_PER_S:,} prompt tokens/s each and cache {BLOCKS * BLOCK_TOKENS:,}.",
        highlight=False,
    )
    work_dir = Path(tempfile.mkdtemp(prefix="kvaffinity-demo-"))
    try:
        with stopped_at_the_end(work_dir) as processes, progress_bar(console) as progress:
            theirs, ours = compare(processes, envoy_config, sessions, progress)
    except (RuntimeError, OSError) as fault:
        raise click.ClickException(str(fault)) from fault
    finally:
        if keep_logs:
            console.print(f"Logs and configurations: {work_dir}", soft_wrap=True)
        else:
            shutil.rmtree(work_dir)
    console.print(table(theirs, ours))
    console.print(verdict(theirs, ours), highlight=False)
    sys.exit(1 if theirs.errors or ours.errors else 0)


def compare(
    processes: Processes, envoy_config: Path, sessions: Sequence[Session], progress: Progress
) -> tuple[Summary, Summary]:
    """Start everything, replay twice: the summaries of round robin and of kvaffinity."""
    standard = (*NODES, EXT_PROC, LISTENER, ADMIN)
    *free, metrics, plain_listener, plain_admin = free_ports(len(standard) + 3)
    ports = dict(zip(standard, free, strict=True))
    nodes = [ports[node] for node in NODES]
    start_nodes(processes, nodes)
    requests = sum(len(session.turns) for session in sessions)
    bars = [progress.add_task(name, total=requests, start=False) for name in ("round robin", "kvaffinity")]

    def run(listener: int, bar: TaskID) -> Summary:
        progress.start_task(bar)
        url = f"http://127.0.0.1:{listener}"
        replies = asyncio.run(replay(url, MODEL, sessions, on_reply=lambda: progress.advance(bar)))
        return summarize(replies, nodes=len(NODES))

    with running_envoy(
        processes, "envoy-round-robin", round_robin_config(plain_listener, plain_admin, nodes), plain_admin
    ):
        theirs = run(plain_listener, bars[0])
    for node in nodes:
        urllib.request.urlopen(f"http://127.0.0.1:{node}/reset_prefix_cache", data=b"", timeout=5.0).close()
    start_server(processes, ports[EXT_PROC], metrics, nodes)
    with running_envoy(processes, "envoy-kvaffinity", load_config(envoy_config, ports), ports[ADMIN]):
        return theirs, run(ports[LISTENER], bars[1])


def start_nodes(processes: Processes, ports: Sequence[int]) -> None:
    """Start one simulated node on each port and wait until all answer."""
    options = (
        f"--model {MODEL} --blocks {BLOCKS} --block-tokens {BLOCK_TOKENS} --prefill-rate {PREFILL_TOKENS_PER_S} "
        f"--decode-ms {DECODE_MS}"
    )
    children = [
        processes.start(
            f"node-{number}",
            [sys.executable, "-m", "extproc.lab.node", *f"--name node-{number} --port {port} {options}".split()],
        )
        for number, port in enumerate(ports, start=1)
    ]
    for child, port in zip(children, ports, strict=True):
        processes.wait_until(child, http_ok(f"http://127.0.0.1:{port}/health"))


def start_server(processes: Processes, listen: int, metrics: int, nodes: Sequence[int]) -> None:
    """Start `kvaffinity serve` and wait until it is ready."""
    lines = [
        "[server]",
        f'listen = "127.0.0.1:{listen}"',
        f'metrics_listen = "127.0.0.1:{metrics}"',
        "[policy]",
        "control_percent = 0",
        "[[models]]",
        f'name = "{MODEL}"',
    ]
    for number, port in enumerate(nodes, start=1):
        lines += ["[[models.nodes]]", f'name = "node-{number}"', f'address = "127.0.0.1:{port}"']
    config = processes.log_dir / "kvaffinity.toml"
    config.write_text("\n".join(lines) + "\n")
    child = processes.start("kvaffinity", [sys.executable, "-m", "extproc", "serve", "--config", str(config)])
    processes.wait_until(child, http_ok(f"http://127.0.0.1:{metrics}/healthz"))


@contextmanager
def running_envoy(processes: Processes, name: str, config: Config, admin: int) -> Iterator[None]:
    """An Envoy with this configuration while the block runs. One worker, so that its round robin is one round."""
    path = write_config(config, processes.log_dir / f"{name}.yaml")
    options = "--concurrency 1 --disable-hot-restart --log-level warning"
    child = processes.start(name, [envoy_binary(), "-c", str(path), *options.split()])
    processes.wait_until(child, http_ok(f"http://127.0.0.1:{admin}/ready"))
    yield
    processes.stop(child)


def round_robin_config(listener: int, admin: int, nodes: Sequence[int]) -> Config:
    """A plain Envoy: one route, one cluster, ROUND_ROBIN."""

    def address(port: int) -> Config:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    prefix = "type.googleapis.com/envoy.extensions.filters"
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{prefix}.http.router.v3.Router"},
    }
    manager = {
        "@type": f"{prefix}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "plain",
        "http_filters": [router],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "nodes", "timeout": "0s"}}],
                }
            ]
        },
    }
    cluster = {
        "name": "nodes",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": "nodes",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(port)}} for port in nodes]}],
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [{"name": "all", "address": address(listener), "filter_chains": [{"filters": filters}]}],
            "clusters": [cluster],
        },
    }


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:11}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def table(theirs: Summary, ours: Summary) -> Table:
    """Both runs side by side; the skew is that of uncached prompt tokens."""
    rows: list[tuple[str, Callable[[Summary], str]]] = [
        ("requests", lambda run: f"{run.requests:,}"),
        ("cache hit rate", lambda run: f"{run.hit_ratio:.1%}"),
        ("prefill tokens avoided", lambda run: f"{run.cached_tokens:,} of {run.prompt_tokens:,}"),
        ("TTFT p50", lambda run: milliseconds(run.ttft_p50_s)),
        ("TTFT p95", lambda run: milliseconds(run.ttft_p95_s)),
        ("TTFT p99", lambda run: milliseconds(run.ttft_p99_s)),
        (
            "node skew (max/mean)",
            lambda run: "-" if run.node_skew is None else f"{run.node_skew:.2f}",
        ),
        ("errors", lambda run: f"{run.errors:,}"),
    ]
    made = Table("", "round robin", "kvaffinity")
    for column in made.columns[1:]:
        column.justify = "right"
    for name, cell in rows:
        made.add_row(name, cell(theirs), cell(ours))
    return made


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms"


def verdict(theirs: Summary, ours: Summary) -> str:
    """One sentence about what was seen, good or bad."""
    if theirs.errors or ours.errors:
        return (
            f"This run proves nothing: {theirs.errors} of {theirs.requests} requests failed with round robin and "
            f"{ours.errors} of {ours.requests} with kvaffinity."
        )

    def change(name: str, before_s: float | None, after_s: float | None) -> str:
        before, after = milliseconds(before_s), milliseconds(after_s)
        if before == after:
            return f"{name} stayed at {before}"
        return f"{name} {'fell' if (after_s or 0.0) < (before_s or 0.0) else 'rose'} from {before} to {after}"

    return (
        f"With kvaffinity {ours.hit_ratio:.0%} of the prompt tokens came from a cache, with round robin "
        f"{theirs.hit_ratio:.0%}; {change('the median time to first token', theirs.ttft_p50_s, ours.ttft_p50_s)}, "
        f"{change('the 95th percentile', theirs.ttft_p95_s, ours.ttft_p95_s)}."
    )


if __name__ == "__main__":
    demo()
