"""Traces by name: a generator's, or a file's whose form is found out by looking; and what a trace is like."""

from __future__ import annotations

import csv
import gzip
import inspect
import shutil
import subprocess
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from extproc.core.types import HASH_BYTES
from extproc.lab.replay.generators import GENERATORS
from extproc.lab.replay.trace_files import CSV_COLUMNS, lengths, mooncake
from extproc.lab.replay.trace_parts import TraceError
from extproc.lab.replay.trace_recording import recording
from extproc.lab.replay.trace_sessions import sessions
from extproc.lab.replay.types import Trace

Value = str | int | float
_Reader = Callable[..., Trace]

_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_MOST_LINE_BYTES = 64 << 20

_FORMS = (
    "a recording of `kvaffinity serve --record`, Mooncake's JSONL (timestamp, input_length, output_length, hash_ids), "
    "agent sessions (requests with hash_rle), or CSV with the columns "
    + ", ".join(titles[0] for titles in CSV_COLUMNS)
    + "; each may be compressed (.zst, .gz)"
)


def load(name_or_path: str, *, seed: int = 0, options: Mapping[str, Value] | None = None) -> Trace:
    """The trace of that name: a generator's or a file's, with options behind a colon ("chat:conversations=500,turns=4")
    or in `options`. Each is a parameter of its reader or generator; `calls_at_most=N` cuts any trace."""
    name, given = _split(name_or_path)
    wanted: dict[str, Value] = {**given, **(options or {})}
    most = int(_converted("calls_at_most", wanted.pop("calls_at_most", 0), 0))
    if name in GENERATORS:
        made = GENERATORS[name](seed, **_accepted(name, GENERATORS[name], wanted))
    elif Path(name).is_file():
        made = _read(Path(name), seed, wanted)
    else:
        raise TraceError(
            f"{name!r} is neither a file nor one of the generators: {', '.join(GENERATORS)}. A file is {_FORMS}"
        )
    if not made.calls:
        raise TraceError(f"{name}: there is no call in it")
    return Trace(made.name, made.block_tokens, made.calls[:most]) if most else made


def catalogue() -> str:
    """The generators with what they model and their options, for a command's help."""
    parts = []
    for name, make in GENERATORS.items():
        about = inspect.getdoc(make) or ""
        listed = ", ".join(f"{key}={default}" for key, default in _parameters(make).items())
        parts.append(f"{name}: {about}\n  options: {listed}")
    return "\n\n".join(parts)


def _split(text: str) -> tuple[str, dict[str, Value]]:
    """Name and options; a colon without `=` behind it is part of the name."""
    name, colon, tail = text.rpartition(":")
    if not colon or "=" not in tail:
        return text, {}
    given: dict[str, Value] = {}
    for part in tail.split(","):
        key, sign, value = part.partition("=")
        if not sign:
            raise TraceError(f"{text!r}: {part!r} is not of the form option=value")
        given[key.strip()] = value.strip()
    return name, given


def _parameters(make: _Reader) -> dict[str, Value]:
    """Its options and what they are by default."""
    return {
        key: parameter.default
        for key, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _accepted(name: str, make: _Reader, wanted: Mapping[str, Value]) -> dict[str, Value]:
    """The options that `make` has, in its types."""
    there = _parameters(make)
    for key in wanted:
        if key not in there:
            listed = ", ".join(f"{known}={default}" for known, default in there.items())
            raise TraceError(f"{name} has no option {key!r}; there are: {listed}, calls_at_most=0 (all)")
    return {key: _converted(key, value, there[key]) for key, value in wanted.items()}


def _converted(key: str, value: Value, default: Value) -> Any:
    kind = type(default)
    try:
        made: Any = kind(value)
    except ValueError as error:
        raise TraceError(f"option {key}: {value!r} is no {kind.__name__}") from error
    if kind is not str and not 0 <= made < 1e12:
        raise TraceError(f"option {key}: {value!r} is out of range")
    return made


# ---- files ----


def _read(path: Path, seed: int, wanted: Mapping[str, Value]) -> Trace:
    try:
        lines = _numbered(path)
        first = next(lines, None)
        if first is None:
            raise TraceError("it is empty")
        reader = _sniffed(first[1])
        return reader(path.name, chain([first], lines), seed, **_accepted(path.name, reader, wanted))
    except (TraceError, OSError, EOFError, zlib.error, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error


def _sniffed(line: bytes) -> _Reader:
    """Which reader a file is for, by its first line."""
    if line.lstrip().startswith(b"{"):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"line 1: {error}") from error
        for key, reader in _BY_FIELD.items():
            if key in fields:
                return reader
        raise TraceError(f"line 1: no trace that is known has the fields {', '.join(fields)}. A file is {_FORMS}")
    if b"," in line:
        return lengths
    raise TraceError(f"line 1 is neither JSON nor CSV. A file is {_FORMS}")


_BY_FIELD: dict[str, _Reader] = {
    "recording": recording,
    "requests": sessions,
    "hash_ids": mooncake,
    "input_length": mooncake,
    "timestamp": mooncake,
}
"""What their lines have; of Mooncake's more than one, so that the error names what is missing."""


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, from 1 on, decompressed where the file's first bytes say that it is compressed."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, line


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic[:2] == _GZIP:
            with gzip.open(file) as plain:
                yield from plain
        elif magic == _ZSTD:
            yield from _zstd_lines(path, file)
        else:
            yield from file


def _zstd_lines(path: Path, file: Any) -> Iterator[bytes]:
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        yield from _zstd_binary(path)
        return
    pending = b""
    try:
        for part in zstandard.ZstdDecompressor().read_to_iter(file):
            *whole, pending = (pending + part).split(b"\n")
            if len(pending) > _MOST_LINE_BYTES:
                raise TraceError("a line is longer than 64 MiB: this is no trace")
            yield from whole
    except zstandard.ZstdError as error:
        raise TraceError(f"cannot be decompressed: {error}") from error
    if pending:
        yield pending


def _zstd_binary(path: Path) -> Iterator[bytes]:
    binary = shutil.which("zstd")
    if binary is None:
        raise TraceError("to read .zst install kvaffinity[compression] or zstd, or decompress it first")
    with subprocess.Popen([binary, "-dc", "--", str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        yield from child.stdout
        if child.wait() != 0:
            raise TraceError("zstd cannot decompress it")


# ---- what a trace is like ----


def describe(trace: Trace) -> str:
    """A few lines: how many calls in what time, how long they are, what an infinite cache would find, and how much of
    the traffic begins alike."""
    calls = trace.calls
    if not calls:
        return f"{trace.name}: no calls"
    length_s, count = calls[-1].at_s, len(calls)
    prompt, answer = sum(call.prompt_tokens for call in calls), sum(call.answer_tokens for call in calls)
    share, tokens = largest_prefix(trace)
    waiting = sum(call.after is not None for call in calls)
    owners = len({call.tenant for call in calls})
    return (
        f"{trace.name}: {count:,} calls in {length_s:,.0f} s"
        + (f" ({waiting / count:.0%} of them wait for another)" if waiting else "")
        + (f", {owners} tenants" if owners > 1 else "")
        + f"\n  {prompt / count:,.0f} prompt and {answer / count:,.0f} answer tokens in the mean, "
        f"blocks of {trace.block_tokens}"
        f"\n  an infinite cache finds {ideal_hit_ratio(trace):.1%} of the prompt tokens"
        f"\n  {share:.1%} of the calls begin with the same {tokens:,} tokens"
    )


def ideal_hit_ratio(trace: Trace) -> float:
    """Share of the prompt tokens that one infinite cache holds when each call comes, all calls before it answered."""
    seen: set[int] = set()
    found = 0
    for call in trace.calls:
        blocks = array("Q", call.chain)
        low, high = 0, len(blocks)
        while low < high:  # who has a block has all before it
            middle = (low + high) // 2
            if blocks[middle] in seen:
                low = middle + 1
            else:
                high = middle
        found += low
        seen.update(blocks[low:])
        seen.update(array("Q", call.answer))
    return found * trace.block_tokens / max(sum(call.prompt_tokens for call in trace.calls), 1)


def largest_prefix(trace: Trace) -> tuple[float, int]:
    """The beginning that most calls share: what share of them, and how many tokens at least nine tenths of these have
    in common. (0.0, 0) where no two begin alike."""
    chains = [call.chain for call in trace.calls if call.chain]
    if not chains:
        return 0.0, 0
    block, most = _commonest(chains, 0)
    if most == 1:
        return 0.0, 0
    chains = [each for each in chains if each.startswith(block)]
    depth, going = 1, most
    while True:
        chains = [each for each in chains if len(each) > HASH_BYTES * depth]
        if len(chains) < 0.9 * most:
            break
        block, going = _commonest(chains, depth)
        if going < 0.9 * most:
            break
        begin = HASH_BYTES * depth
        chains = [each for each in chains if each[begin : begin + HASH_BYTES] == block]
        depth += 1
    return most / len(trace.calls), depth * trace.block_tokens


def _commonest(chains: Sequence[bytes], depth: int) -> tuple[bytes, int]:
    begin = HASH_BYTES * depth
    return Counter(each[begin : begin + HASH_BYTES] for each in chains).most_common(1)[0]


__all__ = ["TraceError", "catalogue", "describe", "ideal_hit_ratio", "largest_prefix", "load"]
