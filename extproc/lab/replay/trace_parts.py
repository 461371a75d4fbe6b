"""What every trace is made of: blocks that stand for a prompt's beginning, conversations that grow, calls in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from random import Random

from extproc.core.types import HASH_BYTES, Chain
from extproc.lab.replay.types import Call, Trace


class TraceError(ValueError):
    """A trace cannot be had; the message says why and what to do."""


def fresh(rng: Random, blocks: int) -> Chain:
    """Blocks that are in no other prompt."""
    return rng.randbytes(HASH_BYTES * blocks)


class Conversation:
    """A prompt that grows turn by turn. All turns are cut from one row of blocks, so equal hash is equal prefix."""

    def __init__(
        self,
        rng: Random,
        block_tokens: int,
        *,
        at_s: float,
        head: Chain = b"",
        head_tokens: int = 0,
        session: int | None = None,
        tenant: int = 0,
    ) -> None:
        """`head`: the full blocks of what it begins with and shares with others, `head_tokens` long."""
        self.calls: list[Call] = []
        """`after` is a number in this list."""
        self._rng = rng
        self._block_tokens = block_tokens
        self._row = bytearray(head)
        self._tokens = head_tokens
        self._at_s = at_s
        self._session, self._tenant = session, tenant

    def turn(self, own_tokens: int, answer_tokens: int, *, pause_s: float = 0.0) -> None:
        """The next call: all that was said before, `own_tokens` more, and its answer, which stays in the history."""
        if self.calls:
            self._at_s += pause_s
        prompt = self._tokens + own_tokens
        self._tokens = prompt + answer_tokens
        begin, end = (HASH_BYTES * (tokens // self._block_tokens) for tokens in (prompt, self._tokens))
        self._row += fresh(self._rng, (end - len(self._row)) // HASH_BYTES)
        call = Call(
            self._at_s,
            prompt,
            answer_tokens,
            bytes(self._row[:begin]),
            bytes(self._row[begin:end]),
            self._session,
            self._tenant,
            len(self.calls) - 1 if self.calls else None,
            pause_s if self.calls else 0.0,
        )
        self.calls.append(call)


def arrange(name: str, block_tokens: int, groups: Iterable[Sequence[Call]]) -> Trace:
    """One trace of all calls, in the order of time from 0.0. In each group `after` is a number within the group, of a
    call that is not later."""
    entries: list[tuple[float, int, Call]] = []
    for group in groups:
        first = len(entries)
        entries += [(call.at_s, first, call) for call in group]
    order = sorted(range(len(entries)), key=lambda number: entries[number][0])
    place = [0] * len(order)
    for rank, number in enumerate(order):
        place[number] = rank
    start_s = entries[order[0]][0] if order else 0.0
    calls = []
    for number in order:
        at_s, first, call = entries[number]
        after = None if call.after is None else place[first + call.after]
        calls.append(call._replace(at_s=at_s - start_s, after=after))
    return Trace(name, block_tokens, calls)


def until(trace: Trace, end_s: float) -> Trace:
    """Without the calls that come later: a closed loop thins out at its end, which no load of a real day does."""
    kept = bisect_right(trace.calls, end_s, key=lambda call: call.at_s)
    return Trace(trace.name, trace.block_tokens, trace.calls[:kept])


def follow_ups(calls: Sequence[Call]) -> dict[int, int]:
    """Which call is the next turn of which, by number, judged by the blocks alone.

    A prompt is taken to be continued by the first later one that has all its blocks, if its last block was new with it:
    where that was known before, prompts that begin alike are no evidence. O(blocks).
    """
    found: dict[int, int] = {}
    last_of: dict[Chain, int] = {}
    seen: set[Chain] = set()
    for number, call in enumerate(calls):
        blocks = [call.chain[at : at + HASH_BYTES] for at in range(0, len(call.chain), HASH_BYTES)]
        if not blocks:
            continue
        before = next((last_of[block] for block in reversed(blocks) if block in last_of), None)
        if before is not None and call.prompt_tokens > calls[before].prompt_tokens:
            found.setdefault(before, number)
        if blocks[-1] not in seen or blocks[-1] in last_of:  # the same prompt again: its last answer is what counts
            last_of[blocks[-1]] = number
        seen.update(blocks)
    return found


def answer_blocks(call: Call, following: Call | None, block_tokens: int, rng: Random) -> Chain:
    """The blocks that a call's answer completes: those of the turn that follows it, as far as that has any."""
    count = (call.prompt_tokens + call.answer_tokens) // block_tokens - call.blocks
    if count <= 0:
        return b""
    begin = len(call.chain)
    kept = b"" if following is None else following.chain[begin : begin + HASH_BYTES * count]
    return kept + fresh(rng, count - len(kept) // HASH_BYTES)
