"""Our token ids against those of vLLM itself, for every request of the corpus and every model."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import models
import pytest
from corpus import COMPLETIONS, MODEL, Request
from ours import Ours
from report import REPORT
from servers import Client
from tokenizers import Tokenizer

from extproc.reading import Passed

REQUIRED = 0.995
AT_ONCE = 2
REQUESTS = corpus.requests()


class Compared(NamedTuple):
    """One request: what the engine made of it, and what we did. Text: why there is nothing."""

    request: Request
    engine: list[int] | str
    ours: memoryview | str
    """A chained hash for each token."""
    wanted: memoryview | None
    """What our hashes of the engine's ids are."""

    @property
    def equal(self) -> bool:
        return self.wanted == self.ours


@pytest.mark.parametrize("name", models.makers())
async def test_our_token_ids_are_the_engines(
    name: str, directories: dict[str, Path], render_ports: dict[str, int]
) -> None:
    with ThreadPoolExecutor(1) as threads:
        ours = Ours(directories[name], threads, block_tokens=1)
        # two halves at once, so that one is ours while the other is the engine's
        shares = [REQUESTS[: len(REQUESTS) // AT_ONCE], REQUESTS[len(REQUESTS) // AT_ONCE :]]
        parts = await asyncio.gather(*(_compare(share, ours, render_ports[name]) for share in shares))
    compared = [each for part in parts for each in part]
    served = [each for each in compared if isinstance(each.engine, list)]
    refused = [(name, each.engine[:90]) for each in compared if isinstance(each.engine, str)]
    tokenizer = Tokenizer.from_file(str(directories[name] / "tokenizer.json"))
    wrong = [(each.request.kind, name, _difference(each, tokenizer)) for each in served if not each.equal]
    equal = 1 - len(wrong) / len(served)
    REPORT.figures.append(
        f"{name}: {len(served) - len(wrong)} of {len(served)} requests have the engine's ids ({equal:.2%}); "
        f"{len(refused)} more are refused by the engine"
    )
    REPORT.differences += wrong
    REPORT.refusals += refused
    assert len(served) >= 500, refused
    assert equal >= REQUIRED, wrong
    assert ours.faults() == 0


async def _compare(requests: list[Request], ours: Ours, port: int) -> list[Compared]:
    compared = []
    with Client(port) as client:
        for request in requests:
            status, answer = await asyncio.to_thread(client.post, f"{request.path}/render", request.body)
            if status != 200:
                compared.append(Compared(request, f"{status} {_why(answer)}", "", None))
                continue
            # of several prompts the first
            engine: list[int] = (answer[0] if isinstance(answer, list) else answer)["token_ids"]
            try:
                made: memoryview | str = await _hashes(ours, request.path, request.body)
            except (Passed, ValueError) as error:
                made = str(error)
            apart = json.loads(request.body).get("cache_salt")
            body = json.dumps({"model": MODEL, "prompt": engine, "cache_salt": apart}).encode()
            compared.append(Compared(request, engine, made, await _hashes(ours, COMPLETIONS, body)))
    return compared


async def _hashes(ours: Ours, path: str, body: bytes) -> memoryview:
    return memoryview((await ours.read(path, body)).chains[1]).cast("Q")


def _why(answer: Any) -> str:
    return repr(answer["error"]["message"] if isinstance(answer, dict) and "error" in answer else answer)


def _difference(compared: Compared, tokenizer: Tokenizer) -> str:
    if isinstance(compared.ours, str):
        return compared.ours
    assert compared.wanted is not None
    at = sum(1 for _ in takewhile(bool, map(eq, compared.wanted, compared.ours)))
    before, after = (
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (compared.engine[max(at - 8, 0) : at], compared.engine[at : at + 8])
    )
    return f"from token {at} of {len(compared.engine)} (ours: {len(compared.ours)}), {before!r} and there {after!r}"
