"""Our own recordings as traces: what operators replay of their traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import fmean

import msgspec

from extproc.core.types import HASH_BYTES, Chain
from extproc.lab.replay.trace_files import MOST_TOKENS, Lines, decode
from extproc.lab.replay.trace_parts import TraceError, answer_blocks, arrange, follow_ups
from extproc.lab.replay.types import Call, Trace
from extproc.recording import Entry, Header

_HEADER = msgspec.json.Decoder(Header)
_ENTRY = msgspec.json.Decoder(Entry)
_ANSWER_TOKENS = 200
"""Where nothing at all tells how long answers are."""


@dataclass(slots=True)
class _Recorded:
    at_s: float
    """Since the first header."""
    entry: Entry
    chain: Chain
    part: int
    """Which header it follows."""
    answer_tokens: int = 0
    """0: not known."""
    follows: int | None = None
    """The number of the turn before it."""


def recording(
    name: str,
    lines: Lines,
    seed: int,
    *,
    model: str = "",
    answer_tokens_per_s: float = 30.0,
    closed: int = 0,
) -> Trace:
    """The calls to one model (the one with the most, where none is named), in open loop; with closed=1 a turn waits for
    the answer before it as long as it did then.

    How long answers are is not recorded. Where the next turn told, it is taken from there; else it is estimated from
    the time that the answer took at `answer_tokens_per_s`, and where that was not measured it is the mean of the rest.
    What of the recording is left out, and how many answers are estimated, stands in the trace's name.
    """
    all_calls = list(_entries(lines))
    models = Counter(each.entry.model for each in all_calls)
    chosen = model or (models.most_common(1)[0][0] if models else "")
    calls = [each for each in all_calls if each.entry.model == chosen]
    if not calls:
        raise TraceError(f"no call to {model!r}; models are: {', '.join(models) or 'none'}")
    calls.sort(key=lambda each: each.at_s)
    sizes = Counter(each.entry.block_tokens for each in calls if each.entry.block_tokens)
    block_tokens = sizes.most_common(1)[0][0] if sizes else 64
    unkeyed = 0
    for each in calls:
        if each.entry.block_tokens != block_tokens:
            each.chain = b""
            unkeyed += 1
    told = _link(calls)
    for each in calls:
        if not each.answer_tokens:
            each.answer_tokens = _estimated(each.entry, answer_tokens_per_s)
    known = [each.answer_tokens for each in calls if each.answer_tokens]
    mean = round(fmean(known)) if known else _ANSWER_TOKENS
    notes = [f"{chosen}, the answers of {1 - told / len(calls):.0%} estimated at {answer_tokens_per_s:g} tokens/s"]
    if len(models) > 1:
        notes.append(f"{len(all_calls) - len(calls)} calls to other models left out")
    if unkeyed:
        notes.append(f"{unkeyed} prompts without blocks")
    drawn = list(_calls(calls, mean, block_tokens, Random(seed), closed=bool(closed)))
    return arrange(f"{name} ({'; '.join(notes)})", block_tokens, [drawn])


def _entries(lines: Lines) -> Iterator[_Recorded]:
    """Each with its whole chain. A line that is cut off, by a crash or because the file is still written to, is left
    out: the last, or one before a header."""
    first: Header | None = None
    offset_s, part, chains = 0.0, 0, list[Chain]()
    broken: TraceError | None = None
    for number, line in lines:
        if line.startswith(b'{"recording":'):
            header, broken = decode(_HEADER, number, line), None
            first = first or header
            offset_s, part, chains = max(header.started_at_s - first.started_at_s, 0.0), part + 1, []
            continue
        if broken is not None:
            raise broken
        try:
            entry = decode(_ENTRY, number, line)
        except TraceError as error:
            broken = error
            continue
        if entry.back > len(chains):
            raise TraceError(f"line {number}: back {entry.back} is before the header")
        before = chains[-entry.back] if entry.back else b""
        if entry.kept * HASH_BYTES > len(before) or len(entry.new) % HASH_BYTES:
            raise TraceError(f"line {number}: kept or new does not fit")
        chains.append(before[: HASH_BYTES * entry.kept] + entry.new)
        yield _Recorded(offset_s + entry.at_s, entry, chains[-1], part)


def _link(calls: list[_Recorded]) -> int:
    """Note which call follows which, and the answers that are told by those that follow; how many these are."""
    named: dict[tuple[int, int], int] = {}
    told = 0
    for number, each in enumerate(calls):
        entry = each.entry
        before = None if entry.before is None else named.get((each.part, entry.before))
        if before is not None:
            each.follows = before
            if entry.answered:
                told += not calls[before].answer_tokens
                calls[before].answer_tokens = min(entry.answered, MOST_TOKENS)
        if entry.turn is not None:
            named[each.part, entry.turn] = number
    plain = [Call(each.at_s, each.entry.prompt_tokens, 1, each.chain, b"") for each in calls]
    for before, number in follow_ups(plain).items():
        if calls[number].follows is None:
            calls[number].follows = before
    return told


def _estimated(entry: Entry, answer_tokens_per_s: float) -> int:
    """0: there is nothing to tell by (a whole answer that came at once has no first token)."""
    if entry.ttft_s is None or entry.total_s is None:
        return 0
    return min(max(round((entry.total_s - entry.ttft_s) * answer_tokens_per_s), 0), MOST_TOKENS)


def _calls(
    calls: list[_Recorded], answer_tokens: int, block_tokens: int, rng: Random, *, closed: bool
) -> Iterator[Call]:
    """In their order. `answer_tokens`: where it is not known."""
    following: dict[int, _Recorded] = {}
    for each in calls:
        if each.follows is not None:
            following.setdefault(each.follows, each)
    ids: dict[tuple[str, int, int], int] = {}
    at: list[float] = []
    for number, each in enumerate(calls):
        entry, after, pause_s, at_s = each.entry, None, 0.0, each.at_s
        if closed and each.follows is not None:
            before = calls[each.follows]
            pause_s = each.at_s - before.at_s - (before.entry.total_s or 0.0)
            if pause_s >= 0.0:
                after, at_s = each.follows, at[each.follows] + pause_s
            else:
                pause_s = 0.0
        at.append(at_s)
        next_turn = following.get(number)
        tokens = each.answer_tokens or answer_tokens
        if next_turn is not None:  # which may have the answer in its prompt
            more = next_turn.entry.prompt_tokens - entry.prompt_tokens
            tokens = min(tokens, more) if more > 0 else tokens
        session, tenant = (
            None if value is None else ids.setdefault((kind, each.part, value), len(ids) + 1)
            for kind, value in (("session", entry.session), ("tenant", entry.tenant))
        )
        call = Call(at_s, max(entry.prompt_tokens, 1), tokens, each.chain, b"", session, tenant or 0, after, pause_s)
        kept = next_turn.chain if next_turn is not None else b""
        after_chain = call._replace(chain=kept) if kept.startswith(each.chain) else None
        yield call._replace(answer=answer_blocks(call, after_chain, block_tokens, rng))
