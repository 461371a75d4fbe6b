"""vLLM's servers as processes: started, waited for, asked, ended with all that they started."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from corpus import MODEL
from tokenizers import Tokenizer

from extproc.core.types import NodeId

_RENDER_SERVERS = Path(__file__).with_name("render_servers.py")
_READY_S = 240.0
_END_S = 15.0
BLOCK_TOKENS = 32
_VLLM = (
    *("--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
    *("--block-size", str(BLOCK_TOKENS), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
)


def installed() -> Path:
    """Where `tests/engines/install` put vLLM; RuntimeError when it did not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("KVAFFINITY_VLLM") or cache / "kvaffinity" / "vllm")
    if not (folder / "bin" / "vllm").exists():
        raise RuntimeError(f"no vLLM in {folder}: `make test-vllm` installs it")
    return folder


class Answer(NamedTuple):
    status: int
    body: Any


class Client:
    """One kept connection to a server on this machine."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def post(self, path: str, body: bytes) -> Answer:
        try:
            return self._post(path, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            # the server closes connections that it finds idle, and may do so just now
            self._connection.close()
            return self._post(path, body)

    def get(self, path: str) -> int:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def _post(self, path: str, body: bytes) -> Answer:
        self._connection.request("POST", path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        try:
            return Answer(answer.status, json.loads(data))
        except ValueError:
            return Answer(answer.status, data.decode(errors="replace"))


@contextmanager
def render_servers(models: Sequence[Path], logs: Path, *options: str) -> Iterator[dict[Path, int]]:
    """One render server (no engine: template and tokenizer only) for each model; the ports they listen on."""
    ports = dict(zip(models, _free_ports(len(models)), strict=True))
    served = [f"{model}={port}" for model, port in ports.items()]
    command = [str(installed() / "bin" / "python"), str(_RENDER_SERVERS), *served, "--", *_COMMON, *options]
    with _running(command, logs / "render.log", ports.values()):
        yield ports


@contextmanager
def engine(model: Path, logs: Path, *options: str) -> Iterator[int]:
    """A whole vLLM server for one model, on one core; the port it listens on."""
    (port,) = _free_ports(1)
    command = [str(installed() / "bin" / "vllm"), "serve", str(model), "--port", str(port), *_COMMON, *options]
    with _running(command, logs / "engine.log", [port]):
        yield port


@dataclass(slots=True)
class Engine:
    """A whole vLLM server that keeps its port while its process comes and goes."""

    command: Sequence[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = _started(self.command, self.log, VLLM_SERVER_DEV_MODE="1")

    def give_way(self, nice: int = 19) -> None:
        """From now on it takes the processor from what routes to it no more than on a machine of its own. With 19 it
        hardly runs beside other work: too slowly to start several ranks, which have two minutes to find each other."""
        assert self.process is not None
        os.setpriority(os.PRIO_PGRP, self.process.pid, 10)
        # where the kernel groups processes by session, `nice` counts inside a group only
        with suppress(OSError):
            Path(f"/proc/{self.process.pid}/autogroup").write_text(str(nice))

    def wait(self) -> None:
        """Until it is ready."""
        assert self.process is not None
        _wait_until_ready(self.process, self.log, [self.port])

    def kill(self) -> None:
        """SIGKILL to all that it is, and wait for its end."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def engines(model: Path, logs: Path, options: Sequence[Sequence[str]]) -> Iterator[list[Engine]]:
    """Servers for one model, each with options of its own, started at once; /reset_prefix_cache is there."""
    found = []
    for number, (port, more) in enumerate(zip(_free_ports(len(options)), options, strict=True), 1):
        command = [str(installed() / "bin" / "vllm"), "serve", str(model), "--port", str(port), *_COMMON, *more]
        found.append(Engine(command, port, logs / f"engine-{number}.log"))
    try:
        for each in found:
            each.start()
        for each in found:
            each.wait()
        yield found
    finally:
        for each in found:
            if each.process is not None:
                _end(each.process)


@dataclass(slots=True)
class Feed:
    """Where one engine tells what it caches. With several ranks, rank r has the ports r above these."""

    events: int
    replay: int

    def option(self) -> str:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://[::ffff:127.0.0.1]:{self.events}",  # the form in which vLLM binds loopback only
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
            "topic": "",
        }
        return json.dumps(config)


@dataclass(slots=True)
class Fleet:
    """Engines, and what our server and Envoy need to know of them."""

    engines: dict[str, Engine]
    """By the name of their cluster in Envoy."""
    feeds: dict[str, Feed]
    model: Path
    words: list[int]
    """Tokens that are whole words: an answer of them is mostly the same tokens when it is read again."""
    ranks: int

    @property
    def nodes(self) -> list[NodeId]:
        if self.ranks == 1:
            return [*self.engines]
        return [f"{name}/{rank}" for name in self.engines for rank in range(self.ranks)]


@contextmanager
def serving(model: Path, logs: Path, names: Sequence[str], *, blocks: int, ranks: int = 1) -> Iterator[Fleet]:
    """One engine for each name, with so many ranks, each with a cache of so many blocks."""
    ports = iter(_free_ports(2 * len(names), in_a_row=ranks))
    feeds = {name: Feed(next(ports), next(ports)) for name in names}
    options = [*_VLLM, "--num-gpu-blocks-override", str(blocks)]
    if ranks > 1:
        options += ["--data-parallel-size", str(ranks), "--api-server-count", "1"]
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    words = sorted(number for token, number in vocabulary.items() if token[0] == "Ġ" and token[1:].isalpha())
    each_with_feed = [(*options, "--kv-events-config", feed.option()) for feed in feeds.values()]
    with engines(model, logs, each_with_feed) as found:
        yield Fleet(dict(zip(names, found, strict=True)), feeds, model, words, ranks)


_COMMON = ("--host", "127.0.0.1", "--disable-uvicorn-access-log")


def _free_ports(count: int, *, in_a_row: int = 1) -> list[int]:
    """`count` ports; of each, the next `in_a_row` - 1 are free as well."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + in_a_row):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(first)
    return found


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    return {
        **kept,
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(installed() / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }


@contextmanager
def _running(command: Sequence[str], log: Path, ports: Iterable[int]) -> Iterator[None]:
    """`command` as a group of its own while it answers /health on all `ports`; its log's end when it does not."""
    process = _started(command, log)
    try:
        _wait_until_ready(process, log, ports)
        yield
    finally:
        _end(process)


def _started(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    env = _environment() | environment
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=log.parent, start_new_session=True
        )


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, ports: Iterable[int]) -> None:
    deadline = time.monotonic() + _READY_S
    waiting = list(ports)
    while waiting:
        if process.poll() is not None or time.monotonic() > deadline:
            state = "is not ready" if process.returncode is None else f"ended with {process.returncode}"
            tail = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"vLLM {state}; the end of {log}:\n{tail}")
        waiting = [port for port in waiting if not _healthy(port)]
        time.sleep(0.1)


def _healthy(port: int) -> bool:
    try:
        with Client(port) as client:
            return client.get("/health") == 200
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the whole group, SIGKILL to what is left of it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(_END_S)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
