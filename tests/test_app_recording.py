"""`kvaffinity serve --record`: what is served is recorded, and what is recorded can be replayed."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from extproc.lab.replay import traces
from extproc.listening import ACCESS_LOG
from extproc.wire.envoy_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from tests.builders import chat, entry, log_of, prose, ticket_of, until
from tests.test_app import Served, config, free_port, run, served

CANARY = "xyzzy-canary-4711"
QUESTION = f"{CANARY} {prose(4000)}"
SECOND_TURN = chat(QUESTION, prose(400, about="b"), prose(400, about="c"))


@asynccontextmanager
async def recording(tmp_path: Path, *, server: str = "") -> AsyncIterator[Served]:
    """A process that records to `r`; told to end when the block is over, and it does."""
    async with served(tmp_path, server=server, options=("--record", str(tmp_path / "r"))) as app:
        yield app
        app.process.send_signal(signal.SIGTERM)
        assert await app.ends() == 0


async def answered(app: Served, data: bytes) -> None:
    """Ask, and let Envoy tell how it ended."""
    ticket = ticket_of(await app.ask(data))
    logs = app.channel.stream_unary(
        f"/{ACCESS_LOG}/StreamAccessLogs",
        StreamAccessLogsMessage.SerializeToString,
        StreamAccessLogsResponse.FromString,
    )
    await logs(iter((log_of(entry(ticket)),)))


async def counts(app: Served) -> dict[str, float]:
    lines = [line.split() for line in (await app.page()).splitlines() if line.startswith("kvaffinity_record")]
    return {name.removeprefix("kvaffinity_"): float(value) for name, value in lines}


async def test_what_was_served_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    async with recording(tmp_path, server="ticket_ttl_s = 1") as app:
        await answered(app, chat(QUESTION))
        app.path.write_text(config(app.listen, app.pages, "n1", "n2", "n3", server="ticket_ttl_s = 1"))
        app.process.send_signal(signal.SIGHUP)
        await until(lambda: "configuration reloaded: m on 3 nodes" in app.log())
        await answered(app, SECOND_TURN)
        await app.ask(chat("no access log comes"))
        shown = {"recorded_requests_total": 3.0, "recording_dropped_total": 0.0, "recording_stopped": 0.0}

        async def all_are_written() -> bool:
            return await counts(app) == shown

        await until(all_are_written)
        state = json.loads(await app.page("/healthz"))["recording"]
        assert state == {"file": str(path), "written": 3, "dropped": 0, "stopped": None}
        await answered(app, SECOND_TURN)  # which the end writes
    assert CANARY not in path.read_text()
    assert [json.loads(line)["end"] for line in path.read_text().splitlines()[1:]] == [
        *("served", "served", "lost", "served")
    ]
    trace = traces.load(str(path))
    first, second, unanswered, last = trace.calls
    assert first.blocks >= 15
    assert second.chain.startswith(first.chain)
    assert last.chain == second.chain
    assert not unanswered.chain
    replayed = ("--trace", str(path), "--policy", "ours,least-request", "--nodes", "2", "--warm-up", "0")
    code, said = await run("replay", *replayed, "--json", str(tmp_path / "figures"))
    assert code == 0, said
    runs = json.loads((tmp_path / "figures").read_text())["runs"]
    assert [each["policy"] for each in runs] == ["ours", "least-request"]


async def test_the_next_start_goes_on_in_the_same_file_but_no_two_at_once(tmp_path: Path) -> None:
    path, other = tmp_path / "r", tmp_path / "other.toml"
    other.write_text(config(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", "n1"))
    async with recording(tmp_path) as app:
        await answered(app, chat(QUESTION))
        code, said = await run("serve", "--config", str(other), "--record", str(path))
        assert code == 1
        assert f"Error: {path} is being recorded to by another process: give another path" in said
    async with recording(tmp_path) as app:
        await answered(app, chat(QUESTION))
    first, second = traces.load(str(path)).calls
    assert 0.0 == first.at_s < second.at_s < 60.0
    assert first.chain[:8] != second.chain[:8]
    assert path.read_text().count('{"recording":') == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("notes", "precious\n", "notes is there and no recording: give another path, nothing was written to it"),
        ("missing/r", None, "missing/r: No such file or directory; give a file that can be written, where there is a"),
    ],
)
async def test_a_file_that_cannot_be_recorded_to_is_a_clear_error_and_not_a_trace(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    path, file = tmp_path / "kvaffinity.toml", tmp_path / name
    path.write_text(config(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", "n1"))
    if content is not None:
        file.write_text(content)
    code, said = await run("serve", "--config", str(path), "--record", str(file))
    assert code == 1
    assert says in said
    assert said.startswith("Error: ")
    assert "Traceback" not in said
    assert content is None or file.read_text() == content


async def test_without_it_nothing_is_recorded(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        await answered(app, chat(QUESTION))
        assert await counts(app) == {}
        assert json.loads(await app.page("/healthz"))["recording"] is None
