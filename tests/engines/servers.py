"""vLLM's servers as processes: started, waited for, asked, ended with all that they started."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_RENDER_SERVERS = Path(__file__).with_name("render_servers.py")
_READY_S = 240.0
_END_S = 15.0


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
        # On machines of their own they would not take the processor from what routes to them. Where the kernel groups
        # processes by session, `nice` counts inside a group only.
        os.setpriority(os.PRIO_PGRP, self.process.pid, 10)
        with suppress(OSError):
            Path(f"/proc/{self.process.pid}/autogroup").write_text("19")

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


_COMMON = ("--host", "127.0.0.1", "--disable-uvicorn-access-log")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


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
def _running(command: Sequence[str], log: Path, ports: Sequence[int]) -> Iterator[None]:
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


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, ports: Sequence[int]) -> None:
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
