"""Recorded agent sessions (kv-cache-tester's, run-length coded): many turns, closed loop, prefixes shared by model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from random import Random

import msgspec

from extproc.core.types import HASH_BYTES, Chain
from extproc.lab.replay.trace_files import Lines, Natural, Positive, Seconds, Tokens, decode
from extproc.lab.replay.trace_parts import TraceError, answer_blocks, arrange, fresh, until
from extproc.lab.replay.types import Call, Trace


class _Request(msgspec.Struct, tag_field="type", tag="n", rename={"prompt_tokens": "in", "answer_tokens": "out"}):
    t: Seconds
    model: str
    prompt_tokens: Positive
    answer_tokens: Tokens
    hash_rle: list[Natural]
    """Pairs of the first id and how many."""
    api_time: Seconds = 0.0
    think_time: Seconds | None = None
    """Since the answer before."""


class _Streamed(_Request, tag_field="type", tag="s"):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    tool_tokens: Tokens
    system_tokens: Tokens
    requests: list[_Request | _Streamed]
    """Their times are from `t` on."""


class _Session(msgspec.Struct):
    block_size: Positive
    tool_tokens: Tokens
    system_tokens: Tokens
    requests: list[_Request | _Streamed | _Subagent]


_SESSION = msgspec.json.Decoder(_Session)


class _Shared:
    """What sessions share: tools come first, then the system prompt, each by its length and the model."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._rows: dict[tuple[str, int, int | None], Chain] = {}

    def blocks(self, model: str, tool_tokens: int, system_tokens: int, block: int) -> Chain:
        """Those of the prefix, in blocks of `block` tokens. Who has the same tools shares those, whatever follows."""
        tools, whole = tool_tokens // block, (tool_tokens + system_tokens) // block
        head = self._row((model, tool_tokens, None), tools)
        return head + self._row((model, tool_tokens, system_tokens), whole - tools)

    def _row(self, key: tuple[str, int, int | None], blocks: int) -> Chain:
        if key not in self._rows:
            self._rows[key] = fresh(self._rng, blocks)
        return self._rows[key]


def sessions(
    name: str,
    lines: Lines,
    seed: int,
    *,
    sessions: int = 0,
    start_s: float = 3600.0,
    end_s: float = 3600.0,
    most_pause_s: float = 300.0,
    block_tokens: int = 512,
) -> Trace:
    """The first `sessions` (0: all), begun at random times within `start_s`, with the pauses that were recorded, but
    none over `most_pause_s`; what would come after `end_s` (0: no end) is left out. A subagent's calls are a row of
    their own in the session, which the session's last call before it begins.

    The recorded blocks of 64 tokens are taken together to `block_tokens`. Ids are local to a session, so what sessions
    share is modelled: the tools of whoever has the same model and as many tokens of tools, and the system prompt too
    where that is as long.
    """
    rng = Random(seed)
    shared = _Shared(rng)
    groups: list[list[Call]] = []
    for number, line in lines:
        if sessions and len(groups) == sessions:
            break
        session = decode(_SESSION, number, line)
        if block_tokens % session.block_size:
            raise TraceError(
                f"line {number}: blocks of {session.block_size} tokens cannot be taken together to {block_tokens} "
                "(option block_tokens)"
            )
        try:
            groups.append(_calls(session, rng, shared, len(groups), rng.random() * start_s, most_pause_s, block_tokens))
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from error
    trace = arrange(name, block_tokens, groups)
    return until(trace, end_s) if end_s else trace


def _calls(
    session: _Session,
    rng: Random,
    shared: _Shared,
    number: int,
    at_s: float,
    most_pause_s: float,
    block_tokens: int,
) -> list[Call]:
    """One session's, its subagents' behind them; `after` counts in this list."""
    main = [each for each in session.requests if not isinstance(each, _Subagent)]
    agents = [each for each in session.requests if isinstance(each, _Subagent)]
    table = _Table(session, rng)
    table.begin(main, session.tool_tokens, session.system_tokens, shared, block_tokens)
    for agent in agents:
        table.begin(agent.requests, agent.tool_tokens, agent.system_tokens, shared, block_tokens)
    calls = list(_turns(main, table, rng, number, at_s, most_pause_s, block_tokens))
    for agent in agents:
        before = [turn for turn, request in enumerate(main) if request.t <= agent.t]
        first = len(calls)
        turns = _turns(agent.requests, table, rng, number, at_s, most_pause_s, block_tokens)
        if before:
            caller = calls[before[-1]]
            pause_s = min(max(agent.t - main[before[-1]].t - main[before[-1]].api_time, 0.0), most_pause_s)
            shift_s = caller.at_s + pause_s - at_s
        else:
            caller, pause_s, shift_s = None, 0.0, min(agent.t, most_pause_s)
        for call in turns:
            if call.after is not None:
                call = call._replace(after=call.after + first)
            elif caller is not None:
                call = call._replace(after=before[-1], pause_s=pause_s)
            calls.append(call._replace(at_s=call.at_s + shift_s))
    return calls


def _turns(
    requests: Sequence[_Request],
    table: _Table,
    rng: Random,
    session: int,
    at_s: float,
    most_pause_s: float,
    block_tokens: int,
) -> Iterator[Call]:
    """One after the other; `after` counts from the first of them."""
    drawn: list[Call] = []
    before: _Request | None = None
    for turn, request in enumerate(requests):
        pause_s = 0.0
        if before is not None:
            gap_s = request.t - before.t - before.api_time if request.think_time is None else request.think_time
            pause_s = min(max(gap_s, 0.0), most_pause_s)
            at_s += pause_s
        chain = table.chain(request, block_tokens)
        answer_tokens = max(request.answer_tokens, 1)
        after = turn - 1 if turn else None
        drawn.append(Call(at_s, request.prompt_tokens, answer_tokens, chain, b"", session, 0, after, pause_s))
        before = request
    for call, following in zip(drawn, [*drawn[1:], None], strict=True):
        kept = (
            following is not None
            and following.prompt_tokens >= call.prompt_tokens + call.answer_tokens
            and following.chain.startswith(call.chain)
        )
        yield call._replace(answer=answer_blocks(call, following if kept else None, block_tokens, rng))


class _Table:
    """What each id of a session stands for, one hash each; ids are chained: each has one place in one prefix."""

    def __init__(self, session: _Session, rng: Random) -> None:
        self._size = session.block_size
        self._begun: set[int] = set()
        most = 0
        for each in session.requests:
            for request in each.requests if isinstance(each, _Subagent) else (each,):
                rle = request.hash_rle
                if len(rle) % 2 or sum(rle[1::2]) < request.prompt_tokens // self._size:
                    raise TraceError(f"hash_rle of the request at t {request.t} is not pairs for all its blocks")
                most = max(most, *(first + count for first, count in zip(rle[::2], rle[1::2], strict=True)), 0)
        if most > 1 << 24:
            raise TraceError(f"hash_rle has ids up to {most}: more than any session has")
        self._hashes = array("Q", fresh(rng, most))

    def begin(
        self,
        requests: Sequence[_Request],
        tool_tokens: int,
        system_tokens: int,
        shared: _Shared,
        block_tokens: int,
    ) -> None:
        """The prefix of the first request of `requests` is what it shares with other sessions; but who begins as one
        before does shares with that."""
        if not requests:
            return
        head = array("Q", shared.blocks(requests[0].model, tool_tokens, system_tokens, block_tokens))
        step = block_tokens // self._size
        ids = [first + at for first, count in _runs(requests[0]) for at in range(count)][step - 1 :: step]
        if ids and ids[0] not in self._begun:
            self._begun.add(ids[0])
            for each, block in zip(ids, head, strict=False):
                self._hashes[each] = block

    def chain(self, request: _Request, block_tokens: int) -> Chain:
        """The full blocks of its prompt."""
        step, row, place = block_tokens // self._size, array("Q"), 0
        for first, count in _runs(request):
            skipped = (step - 1 - place) % step
            row += self._hashes[first + skipped : first + count : step]
            place += count
        return row.tobytes()[: HASH_BYTES * (request.prompt_tokens // block_tokens)]


def _runs(request: _Request) -> Iterator[tuple[int, int]]:
    return zip(request.hash_rle[::2], request.hash_rle[1::2], strict=True)
