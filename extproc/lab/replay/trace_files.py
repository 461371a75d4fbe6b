"""Files of other people's traces: Mooncake's JSONL, and CSV with lengths only."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby, pairwise
from random import Random
from statistics import median
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from extproc.core.types import HASH_BYTES, Chain
from extproc.lab.replay.trace_parts import TraceError, answer_blocks, arrange, follow_ups, fresh
from extproc.lab.replay.types import Call, Trace

Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
MOST_TOKENS = 10_000_000
"""No prompt is longer, whatever a file says."""
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Positive = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=0.0)]
Lines = Iterable[tuple[int, bytes]]
"""With their numbers, from 1."""

_Record = TypeVar("_Record")


def decode(decoder: msgspec.json.Decoder[_Record], number: int, line: bytes) -> _Record:
    """One line of JSON; TraceError names the line and the field."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"line {number}: {error}") from error


# ---- Mooncake ----


class _MooncakeRequest(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds."""
    input_length: Positive
    output_length: Tokens
    hash_ids: list[Natural]


_MOONCAKE = msgspec.json.Decoder(_MooncakeRequest)


def mooncake(name: str, lines: Lines, seed: int, *, block_tokens: int = 512) -> Trace:
    """Open loop. A prompt that a later one continues has that one's blocks in its answer, else unique ones.

    Its times are those of bins (about 3 s, and a dozen requests in each): arrivals are spread over their bin, in the
    order of the file. Times that hardly any two requests share are left as they are.
    """
    rng = Random(seed)
    calls = []
    for number, line in lines:
        request = decode(_MOONCAKE, number, line)
        full = request.input_length // block_tokens
        if len(request.hash_ids) < full:
            raise TraceError(
                f"line {number}: hash_ids has {len(request.hash_ids)} blocks, and input_length {request.input_length} "
                f"makes {full} of {block_tokens} tokens: is it another block size? (option block_tokens)"
            )
        chain = _chained(request.hash_ids[:full])
        calls.append(Call(request.timestamp / 1000, request.input_length, max(request.output_length, 1), chain, b""))
    calls.sort(key=lambda call: call.at_s)
    calls = _spread(calls, rng)
    following = follow_ups(calls)
    for number, call in enumerate(calls):
        after = calls[following[number]] if number in following else None
        if after is not None and after.prompt_tokens < call.prompt_tokens + call.answer_tokens:
            after = None  # the answer does not fit in: this is another turn
        calls[number] = call._replace(answer=answer_blocks(call, after, block_tokens, rng))
    return arrange(name, block_tokens, [calls])


def _chained(ids: list[int]) -> Chain:
    """Equal hash, equal prefix, whatever the file's ids stand for."""
    parent, hashes = 0, []
    for each in ids:
        parent = xxh3_64_intdigest(each.to_bytes(HASH_BYTES, "little"), parent)
        hashes.append(parent.to_bytes(HASH_BYTES, "little"))
    return b"".join(hashes)


def _spread(calls: list[Call], rng: Random) -> list[Call]:
    """Arrivals that were rounded to bins, uniformly over their bin; `calls` are in the order of time."""
    bins = [list(those) for _, those in groupby(calls, key=lambda call: call.at_s)]
    if len(bins) < 2 or len(calls) < 2 * len(bins):
        return calls
    starts = [those[0].at_s for those in bins]
    gaps = [after - before for before, after in pairwise(starts)]
    width = median(gaps)
    spread = []
    for those, gap in zip(bins, [*gaps, width], strict=True):
        offsets = sorted(rng.random() * min(gap, width) for _ in those)
        spread += [call._replace(at_s=call.at_s + offset) for call, offset in zip(those, offsets, strict=True)]
    return spread


# ---- CSV ----

CSV_COLUMNS = (
    ("timestamp", "arrived_at", "time"),
    ("contexttokens", "request tokens", "num_prefill_tokens", "prompt_tokens", "input_length"),
    ("generatedtokens", "response tokens", "num_decode_tokens", "answer_tokens", "output_length"),
)
"""Time (ISO 8601, or seconds), prompt, answer: what the columns are called, in any case (Azure's, BurstGPT's,
Vidur's)."""


def lengths(
    name: str,
    lines: Lines,
    seed: int,
    *,
    block_tokens: int = 64,
    share: float = 0.0,
    prefixes: int = 50,
) -> Trace:
    """Open loop. The file says nothing of what prompts share: nothing, unless `share` (of each prompt's tokens) is
    given. Then each begins with the beginning of one of `prefixes` texts, drawn by chance."""
    if not 0.0 <= share <= 1.0 or prefixes < 1:
        raise TraceError("share is between 0 and 1, and there is at least one prefix")
    rng = Random(seed)
    texts = [b""] * prefixes
    calls = []
    for at_s, prompt, answer in _rows(lines):
        shared, chain = int(share * prompt) // block_tokens, b""
        if shared:
            text = rng.randrange(prefixes)
            texts[text] += fresh(rng, max(0, shared - len(texts[text]) // HASH_BYTES))
            chain = texts[text][: HASH_BYTES * shared]
        chain += fresh(rng, prompt // block_tokens - shared)
        call = Call(at_s, prompt, answer, chain, b"")
        calls.append(call._replace(answer=answer_blocks(call, None, block_tokens, rng)))
    return arrange(name, block_tokens, [calls])


def _rows(lines: Lines) -> Iterator[tuple[float, int, int]]:
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            numbers[:] = [number]
            yield line.decode(errors="replace")

    rows = csv.reader(texts())
    header = [title.strip().lower().lstrip("\ufeff") for title in next(rows, [])]
    places = []
    for titles in CSV_COLUMNS:
        place = next((header.index(title) for title in titles if title in header), None)
        if place is None:
            raise TraceError(f"line 1: no column {' or '.join(titles)}; there are: {', '.join(header)}")
        places.append(place)
    for row in rows:
        if not row:
            continue
        for title, place in zip(("time", "prompt", "answer"), places, strict=True):
            if place >= len(row):
                raise TraceError(f"line {numbers[0]}: {title} is missing")
        time, prompt, answer = (row[place].strip() for place in places)
        try:
            at_s = float(time) if time.replace(".", "", 1).isdigit() else _instant(time)
        except ValueError as error:
            raise TraceError(f"line {numbers[0]}: time {time!r} is neither ISO 8601 nor seconds") from error
        yield at_s, _tokens("prompt", prompt, numbers[0]), _tokens("answer", answer, numbers[0])


def _instant(text: str) -> float:
    """UTC where it says nothing: a local clock may jump in between."""
    instant = datetime.fromisoformat(text)
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()


def _tokens(title: str, text: str, number: int) -> int:
    """At least 1: some count nothing for a request that failed."""
    if not text.isdigit() or int(text) > MOST_TOKENS:
        raise TraceError(f"line {number}: {title} {text!r} is not a number of tokens, of ten million at most")
    return max(int(text), 1)
