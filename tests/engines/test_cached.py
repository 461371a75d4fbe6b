"""What we predict that a node holds against what a real engine says it had (`cached_tokens`), without events."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import models
import pytest
import servers
from corpus import MODEL
from ours import Ours
from report import REPORT
from servers import Client
from tokenizers import Tokenizer

REQUIRED, REQUIRED_OF_TENANT = 0.95, 0.9
REQUIRED_ROUGHLY = 0.1
"""Of the prompt, at the median, without a tokenizer."""
ROUGH_BLOCK_TOKENS = 64
BLOCK_TOKENS = 32
BLOCKS = 8192
"""More than all requests need: nothing is evicted."""
ANSWER_TOKENS = 128
TURNS = 5
ADAPTER = "adapter"
SERVED = "thinking"
AT_ONCE = 2

OPTIONS = (
    *("--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "8192", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048"),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-lora", "--max-lora-rank", "8", "--lora-modules"),
)


class Tenant(NamedTuple):
    """Who talks: some share a system prompt, and some of these not the cache."""

    model: str
    system: int
    salt: str | None = None
    tools: bool = False


TENANTS = (
    Tenant(MODEL, 0),
    Tenant(MODEL, 1, tools=True),
    Tenant(MODEL, 0, salt="one"),
    Tenant(MODEL, 0, salt="two"),
    Tenant(ADAPTER, 0),
    Tenant(ADAPTER, 1, salt="one"),
)
SYSTEM_WORDS = (500, 150)
CONVERSATIONS = 6
"""Of each tenant. They open alike for all tenants: what must be kept apart shows in every one of them."""


class Served(NamedTuple):
    """One request: what we predicted when it was sent, and what the engine says."""

    tenant: Tenant
    predicted: int
    roughly: float
    """The share of the prompt that is predicted without a tokenizer."""
    ids: list[int]
    """Of the prompt, by the engine."""
    cached: int


@dataclass(slots=True)
class Talks:
    """All conversations, held with one engine; `served` in the order in which they were predicted and sent."""

    port: int
    ours: Ours
    rough: Ours
    """Without a tokenizer."""
    words: list[int]
    served: list[Served | None] = field(default_factory=list)

    async def hold(self, number: int) -> None:
        """One conversation of each tenant, turn about."""
        rng = random.Random(number)
        opening = corpus.prose(rng, 120)
        said = {tenant: [_system(tenant)] for tenant in TENANTS}
        with Client(self.port) as client:
            for turn in range(TURNS):
                for tenant, messages in said.items():
                    question = corpus.prose(rng, rng.choice((8, 30, 120))) if turn else opening
                    messages.append({"role": "user", "content": question})
                    answer = await self._ask(client, tenant, messages)
                    messages.append({"role": "assistant", "content": answer})

    async def _ask(self, client: Client, tenant: Tenant, messages: list[Any]) -> str:
        request: dict[str, Any] = {"model": tenant.model, "messages": messages}
        if tenant.salt is not None:
            request["cache_salt"] = tenant.salt
        if tenant.tools:
            request |= {"tools": corpus.TOOLS, "tool_choice": "none"}
        # random weights write noise, which is other tokens when it is read again; whole words mostly are not. No seed:
        # on a CPU, vLLM 0.32 dies of one when a prompt takes more than one step
        sampling = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "allowed_token_ids": self.words}
        body = json.dumps({**request, **sampling, "return_token_ids": True}).encode()
        exact, rough = await self.ours.read(corpus.CHAT, body), await self.rough.read(corpus.CHAT, body)
        predicted, place = self.ours.route(exact), len(self.served)
        roughly = self.rough.route(rough) / rough.prompt_tokens
        self.served.append(None)
        status, answer = await asyncio.to_thread(client.post, corpus.CHAT, body)
        assert status == 200, answer
        usage = answer["usage"]
        assert usage["completion_tokens"] == ANSWER_TOKENS
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.served[place] = Served(tenant, predicted, roughly, answer["prompt_token_ids"], cached)
        return str(answer["choices"][0]["message"]["content"])


async def _hold(talks: Talks, numbers: Iterable[int]) -> None:
    for number in numbers:
        await talks.hold(number)


def _system(tenant: Tenant) -> dict[str, Any]:
    words = corpus.prose(random.Random(tenant.system), SYSTEM_WORDS[tenant.system])
    return {"role": "system", "content": words}


@pytest.fixture
def engine(directories: dict[str, Path], folder: Path) -> Iterator[int]:
    adapter = models.make_adapter(directories[SERVED], folder / ADAPTER)
    with servers.engine(directories[SERVED], folder, *OPTIONS, f"{ADAPTER}={adapter}") as port:
        yield port


async def test_predicted_cached_tokens_of_the_prompt_are_the_engines(engine: int, directories: dict[str, Path]) -> None:
    vocabulary = Tokenizer.from_file(str(directories[SERVED] / "tokenizer.json")).get_vocab()
    words = sorted(number for token, number in vocabulary.items() if token[0] == "Ġ" and token[1:].isalpha())
    with ThreadPoolExecutor(1) as threads:
        ours = Ours(
            directories[SERVED],
            threads,
            block_tokens=BLOCK_TOKENS,
            cache_tokens=BLOCKS * BLOCK_TOKENS,
            adapters=(ADAPTER,),
        )
        rough = Ours(None, threads, block_tokens=ROUGH_BLOCK_TOKENS, adapters=(ADAPTER,))
        talks = Talks(engine, ours, rough, words)
        await asyncio.gather(*(_hold(talks, range(first, CONVERSATIONS, AT_ONCE)) for first in range(AT_ONCE)))
    served = [each for each in talks.served if each is not None]
    assert len(served) == len(talks.served) == CONVERSATIONS * TURNS * len(TENANTS)

    of_prompts = [min(each.cached, seen) for each, seen in zip(served, _seen_in_prompts(served), strict=True)]
    away = [abs(each.predicted - had) for each, had in zip(served, of_prompts, strict=True)]
    within = sum(each <= BLOCK_TOKENS for each in away) / len(away)
    cached, prompts = sum(each.cached for each in served), sum(len(each.ids) for each in served)
    answers = cached - sum(of_prompts)
    REPORT.figures += [
        f"cached tokens of the prompt: {within:.1%} of {len(served)} requests predicted within one block, "
        f"{away.count(0) / len(away):.1%} exactly, at most {max(away)} tokens away",
        f"  of {prompts:,} prompt tokens {cached:,} were cached: {sum(of_prompts):,} of prompts seen before, and "
        f"{answers:,} ({answers / cached:.1%}) of answers, which only events would tell",
    ]
    shares = [had / len(each.ids) for each, had in zip(served, of_prompts, strict=True)]
    apart = sorted(abs(each.roughly - share) for each, share in zip(served, shares, strict=True))
    assert apart[len(apart) // 2] <= REQUIRED_ROUGHLY
    REPORT.figures.append(
        f"  without a tokenizer the predicted share of the prompt is {apart[len(apart) // 2]:.1%} of it away (median; "
        f"95th percentile {apart[int(0.95 * len(apart))]:.1%}, mean {sum(apart) / len(apart):.1%})"
    )
    assert answers > 0
    for tenant in TENANTS:
        of_tenant = [apart for each, apart in zip(served, away, strict=True) if each.tenant is tenant]
        assert sum(apart <= BLOCK_TOKENS for apart in of_tenant) >= REQUIRED_OF_TENANT * len(of_tenant), tenant
    assert within >= REQUIRED, sorted(zip(away, served, strict=True), key=lambda pair: -pair[0])[:5]


def _seen_in_prompts(served: list[Served]) -> list[int]:
    """Of each prompt the leading tokens in whole blocks that stand in a prompt sent before, by the engine's own ids.

    What the engine had beyond them it had from an answer. The last token of a prompt is always computed, so a block
    that ends with it does not count.
    """
    numbers: dict[tuple[Any, tuple[int, ...]], int] = {}
    seen = []
    for each in served:
        parent: Any = (each.tenant.model, each.tenant.salt)
        known = 0
        for at in range(0, len(each.ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = (parent, tuple(each.ids[at : at + BLOCK_TOKENS]))
            if block in numbers and known == at and at + BLOCK_TOKENS < len(each.ids):
                known = at + BLOCK_TOKENS
            parent = numbers.setdefault(block, len(numbers))
        seen.append(known)
    return seen
