"""A router process, and simulated nodes that tell what they cache: what it knows of them without having sent it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.builders import chat, mutated, node_of, prose, until
from tests.test_app import Served, free_port, served
from tests.test_app import environment as clean_environment
from tests.tokens import vocabularies

BLOCK = 16


@dataclass(slots=True)
class Node:
    """A simulated node's process."""

    port: int
    events: int
    replay: int
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.arguments, env=clean_environment({}), stdout=asyncio.subprocess.DEVNULL
        )

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)

    def config(self, name: str) -> str:
        return (
            f'[[models.nodes]]\nname = "{name}"\naddress = "127.0.0.1:{self.port}"\n'
            f'events = "tcp://127.0.0.1:{self.events}"\nreplay = "tcp://127.0.0.1:{self.replay}"\n'
        )


def node(name: str, directory: Path, *more: str) -> Node:
    port, events, replay = free_port(), free_port(), free_port()
    command = [sys.executable, "-m", "extproc", "node", "--name", name, "--port", str(port), "--model", "m"]
    command += ["--block-tokens", str(BLOCK), "--tokenizer", str(directory), "--prefill-rate", "100000"]
    command += ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-replay", f"tcp://127.0.0.1:{replay}", *more]
    return Node(port, events, replay, command)


@dataclass(slots=True)
class Fleet:
    """The router and its nodes."""

    app: Served
    nodes: dict[str, Node]

    async def compute(self, name: str, data: bytes, **headers: str) -> Any:
        """Ask a node itself: the router is not told."""
        url = f"http://127.0.0.1:{self.nodes[name].port}/v1/chat/completions"
        async with self.app.http.post(url, data=data, headers=headers) as answer:
            assert answer.status == 200
            return await answer.json()

    async def value(self, name: str, **labels: str) -> float | None:
        for line in (await self.app.page()).splitlines():
            if line.startswith(f"kvaffinity_{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rpartition(" ")[2])
        return None

    async def rung(self, name: str, rung: int) -> None:
        """Wait until what the node holds is taken from that."""

        async def there() -> bool:
            return await self.value("rung", node=name) == rung

        await until(there, timeout_s=60)

    async def blocks(self, name: str, least: int) -> None:
        async def told() -> bool:
            return (await self.value("prefix_blocks", node=name) or 0) >= least

        await until(told, timeout_s=60)


@asynccontextmanager
async def fleet(tmp_path: Path, *more: str, ranks: int = 1) -> AsyncIterator[Fleet]:
    directory = vocabularies.make("qwen2", tmp_path / "model")
    nodes = {name: node(name, directory, *more) for name in ("n1", "n2")}
    try:
        for each in nodes.values():
            await each.start()
        model = f'tokenizer = "{directory}"\nranks = {ranks}\n[models.events]\n'
        listed = "".join(each.config(name) for name, each in nodes.items())
        async with served(tmp_path, model=model + listed, nodes=()) as app:
            found = Fleet(app, nodes)
            for name in nodes:
                for rank in range(ranks):
                    await found.rung(name if ranks == 1 else f"{name}/{rank}", 3)
            yield found
    finally:
        for each in nodes.values():
            each.kill()
            if each.process is not None:
                await each.process.wait()


async def test_what_a_node_computed_for_others_is_known_from_its_events(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        for about, home in (("a", "n2"), ("b", "n1"), ("c", "n2")):
            data = chat(prose(3000, about=about), max_tokens=1)
            before = await found.value("prefix_blocks", node=home) or 0
            usage = (await found.compute(home, data))["usage"]
            await found.blocks(home, int(before) + usage["prompt_tokens"] // BLOCK)
            assert node_of(await found.app.ask(data)) == home
            matched = await found.value("matched_tokens_total", reason="locality")
            again = (await found.compute(home, data))["usage"]
            assert again["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
        assert matched is not None
        assert matched > 3 * 0.9 * usage["prompt_tokens"]


async def test_answers_are_known_too(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        opening = prose(3000)
        answer = await found.compute("n1", chat(opening, max_tokens=200))
        words = answer["choices"][0]["message"]["content"]
        await found.blocks("n1", (answer["usage"]["total_tokens"] - 1) // BLOCK)
        follow = chat(opening, words, "and more", max_tokens=1)
        await found.app.ask(follow)
        matched = await found.value("matched_tokens_total", reason="locality")
        cached = (await found.compute("n1", follow))["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > answer["usage"]["prompt_tokens"] + 50
        assert matched == cached


@pytest.mark.parametrize("how", ["reset", "restart"])
async def test_what_a_node_forgot_is_forgotten(how: str, tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        data = chat(prose(3000), max_tokens=1)
        await found.compute("n1", data)
        await found.blocks("n1", 30)
        path = {"reset": "/reset_prefix_cache", "restart": "/restart"}[how]
        async with found.app.http.post(f"http://127.0.0.1:{found.nodes['n1'].port}{path}") as answer:
            assert answer.status == 200
        await found.compute("n1", chat("short" * 20, max_tokens=1))  # a reset is told with the next step

        async def forgotten() -> bool:
            return (await found.value("prefix_blocks", node="n1") or 0) < 10

        await until(forgotten, timeout_s=60)
        await found.rung("n1", 3)


async def test_a_killed_node_that_comes_back_is_believed_again_and_holds_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        data = chat(prose(3000), max_tokens=1)
        await found.compute("n1", data)
        await found.blocks("n1", 30)
        found.nodes["n1"].kill()
        await found.rung("n1", 2)
        await found.nodes["n1"].start()
        await found.rung("n1", 3)
        assert await found.value("prefix_blocks", node="n1") == 0
        await found.compute("n1", data)
        await found.blocks("n1", 30)


async def test_each_rank_behind_an_address_is_a_node_of_its_own(tmp_path: Path) -> None:
    async with fleet(tmp_path, "--data-parallel-size", "2", ranks=2) as found:
        for about, home, rank in (("a", "n1", "1"), ("b", "n2", "0"), ("c", "n1", "0")):
            data = chat(prose(3000, about=about), max_tokens=1)
            before = await found.value("prefix_blocks", node=f"{home}/{rank}") or 0
            await found.compute(home, data, **{"x-data-parallel-rank": rank})
            await found.blocks(f"{home}/{rank}", int(before) + 30)
            reply = await found.app.ask(data)
            assert (node_of(reply), mutated(reply)["x-data-parallel-rank"]) == (home, rank)


FAULTS: dict[str, tuple[dict[str, object], int, float]] = {
    "cut": ({"events": "cut"}, 3, 30.0),  # the replay has what was missed
    "delayed 10 s": ({"events": "delay", "delay_s": 10.0}, 3, 40.0),
    "duplicated": ({"events": "duplicate"}, 3, 30.0),
    "reordered": ({"events": "reorder"}, 3, 30.0),
    "cut, replay refused": ({"events": "cut", "replay": "refuse"}, 2, 60.0),
    "cut, replay with the same gap for ever": ({"events": "cut", "replay": "gap"}, 2, 60.0),
}
"""What goes wrong, the rung on which the node ends, and how long that may take on a busy machine."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_happens_to_a_feed_its_node_ends_on_the_rung_that_fits(fault: str, tmp_path: Path) -> None:
    faults, rung, within_s = FAULTS[fault]
    async with fleet(tmp_path) as found:
        url = f"http://127.0.0.1:{found.nodes['n1'].port}/fault"

        async def set_faults(**values: object) -> None:
            async with found.app.http.post(url, data=json.dumps(values)) as answer:
                assert answer.status == 200

        blocks = (await found.compute("n1", chat(prose(3000, about="z"), max_tokens=1)))["usage"][
            "prompt_tokens"
        ] // BLOCK
        await found.blocks("n1", blocks)
        await set_faults(**faults)
        for about in "abc":
            usage = (await found.compute("n1", chat(prose(3000, about=about), max_tokens=1)))["usage"]
            blocks += usage["prompt_tokens"] // BLOCK
        began_s = time.monotonic()
        if "cut" in fault:
            await set_faults(replay=faults.get("replay", "ok"))  # events go on, and the gap shows
            await found.compute("n1", chat(prose(3000, about="d"), max_tokens=1))
        if rung == 3:  # then it knows all of it in the end
            await found.blocks("n1", int(0.8 * blocks))
        await found.rung("n1", rung)
        took_s = time.monotonic() - began_s
        print(f"{fault}: rung {rung} after {took_s:.1f} s")
        assert took_s < within_s
        await found.rung("n2", 3)
