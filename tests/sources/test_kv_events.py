"""The events feed: scripts of messages through the sequencer, and real ZMQ sockets with an engine that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.types import BlocksRemoved, CacheCleared, CacheEvent, FeedState
from extproc.sources.kv_codec import frames
from extproc.sources.kv_events import Endpoint, KvFeed
from extproc.sources.kv_order import Action, Ask, Message, Patience, Sequencer
from tests.builders import until

CAPTURES = Path(__file__).parents[3] / "shared" / "lab" / "captures"
LIVE, LOST, DOWN = FeedState.LIVE, FeedState.LOST, FeedState.DOWN


# ---- the sequencer, by script ----


def message(seq: int, life: int = 0, *, clears: bool = False) -> Message:
    """Of one life of an engine; its one event says which it is."""
    event: CacheEvent = CacheCleared() if clears else BlocksRemoved((seq,), "gpu", life)
    return Message(seq, digest=hash((seq, life, clears)), size=100, events=(event,))


class Desk:
    """A sequencer with a clock, and what somebody who does as it says would know."""

    def __init__(self, *, replay: bool = True, patience: Patience | None = None) -> None:
        self.sequencer = Sequencer(replay=replay, patience=patience)
        self.now = 0.0
        self.known: list[tuple[int, int]] = []
        """(life, seq) of what was applied since the last CacheCleared."""
        self.asked: list[int] = []
        self.states: list[FeedState] = []

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Ask():
                    self.asked.append(action.start)
                case FeedState():
                    self.states.append(action)
                case BlocksRemoved():
                    self.known.append((action.group, action.hashes[0]))  # type: ignore[arg-type]
                case _:
                    self.known.clear()

    def connect(self) -> None:
        self.do(self.sequencer.connected(self.now))
        self.wait(0.1)

    def disconnect(self) -> None:
        self.do(self.sequencer.disconnected())

    def live(self, *seqs: int, life: int = 0) -> None:
        for seq in seqs:
            self.do(self.sequencer.live(message(seq, life), self.now))

    def replay(self, *seqs: int, life: int = 0, end: bool = True) -> None:
        for seq in seqs:
            self.do(self.sequencer.replayed(message(seq, life), self.now))
        if end:
            self.do(self.sequencer.replay_ended(self.now))

    def wait(self, seconds: float) -> None:
        """Time passes, and what is due by then is done when it is due."""
        end = self.now + seconds
        while (due := self.sequencer.due) is not None and due <= end:
            self.now = max(due, self.now)
            self.do(self.sequencer.tick(self.now))
        self.now = end

    @property
    def seqs(self) -> list[int]:
        return [seq for _, seq in self.known]

    def counted(self, **expected: int) -> None:
        assert {name: self.sequencer.counters[name] for name in expected} == expected


def following(upto: int, **arguments: bool) -> Desk:
    """A desk that knows 0 to `upto` - 1."""
    desk = Desk(**arguments)
    desk.connect()
    if arguments.get("replay", True):
        desk.replay(*range(upto))
    else:
        desk.live(*range(upto))
    assert desk.seqs == list(range(upto))
    assert desk.sequencer.state is (LIVE if upto or arguments.get("replay", True) else DOWN)
    return desk


def test_a_late_start_asks_for_all_and_holds_what_comes_meanwhile() -> None:
    desk = Desk()
    desk.do(desk.sequencer.connected(0.0))
    desk.wait(0.04)
    assert desk.asked == [], "the engine may not have the subscription yet"
    desk.wait(0.02)
    assert desk.asked == [0]
    desk.live(3, 4)
    assert desk.known == []
    assert desk.states == []
    desk.replay(0, 1, 2, 3)
    assert desk.seqs == [0, 1, 2, 3, 4]
    assert desk.states == [LIVE]
    assert desk.sequencer.complete


def test_what_is_older_than_the_engine_keeps_is_missing_and_the_feed_says_that_it_is_not_complete() -> None:
    desk = Desk()
    desk.connect()
    desk.replay(7, 8)
    assert (desk.seqs, desk.states, desk.sequencer.complete) == ([7, 8], [LIVE], False)
    desk.do(desk.sequencer.live(message(9, clears=True), desk.now))
    assert (desk.seqs, desk.sequencer.complete) == ([], True)


def test_an_engine_that_has_said_nothing_yet_is_complete() -> None:
    desk = following(0)
    assert desk.sequencer.complete
    desk.live(0)
    assert desk.seqs == [0]


def test_without_a_replay_endpoint_the_first_message_is_the_start() -> None:
    desk = Desk(replay=False)
    desk.connect()
    assert desk.states == []
    desk.live(5)
    assert (desk.seqs, desk.states, desk.asked, desk.sequencer.complete) == ([5], [LIVE], [], False)


def test_reordered_and_repeated_messages_are_applied_once_in_order() -> None:
    desk = following(2)
    desk.live(3, 1, 4, 4, 2, 0, 5)
    assert desk.seqs == [0, 1, 2, 3, 4, 5]
    desk.wait(60)
    desk.counted(duplicates=3, gaps=0, restarts=0, replays=1)


def test_a_message_that_does_not_come_within_half_a_second_is_a_gap_which_the_replay_fills() -> None:
    desk = following(2)
    desk.live(3)
    desk.wait(0.4)
    assert desk.asked == [0]
    desk.wait(0.2)
    assert desk.asked == [0, 1]
    desk.live(4)
    desk.replay(1, 2, 3)
    assert (desk.seqs, desk.states) == ([0, 1, 2, 3, 4], [LIVE])
    desk.counted(gaps=1, lost=0)


def test_more_than_64_messages_after_one_that_is_missing_are_a_gap_at_once() -> None:
    desk = following(2)
    desk.live(*range(3, 67))
    assert desk.asked == [0]
    desk.live(67)
    assert desk.asked == [0, 1]


def test_a_gap_without_a_replay_endpoint_is_lost_and_what_follows_is_a_start() -> None:
    desk = following(2, replay=False)
    desk.live(3, 4)
    desk.wait(1)
    assert (desk.seqs, desk.states, desk.sequencer.complete) == ([3, 4], [LIVE, LOST], False)
    desk.live(5)
    desk.wait(1_000)
    assert (desk.seqs, desk.states) == ([3, 4, 5], [LIVE, LOST])
    desk.do(desk.sequencer.live(message(6, clears=True), desk.now))
    assert (desk.seqs, desk.states, desk.sequencer.complete) == ([], [LIVE, LOST, LIVE], True)


def test_of_several_gaps_that_stay_only_what_follows_the_last_is_known() -> None:
    desk = following(2, replay=False)
    desk.live(3, 4, 7, 8)
    desk.wait(1)
    assert (desk.seqs, desk.states) == ([7, 8], [LIVE, LOST])
    desk.counted(gaps=1, lost=1)


@pytest.mark.parametrize(
    ("seqs", "life", "known", "state"),
    [
        ([3], 0, [(0, 0), (0, 1), (0, 2), (0, 3)], LIVE),
        ([5], 0, [(0, 5)], LOST),
        ([0, 1], 1, [(1, 0), (1, 1)], LIVE),
        ([2], 1, [(1, 2)], LOST),
    ],
)
def test_a_reconnection_without_a_replay_endpoint_is_judged_by_the_next_message(
    seqs: list[int], life: int, known: list[tuple[int, int]], state: FeedState
) -> None:
    desk = following(3, replay=False)
    desk.disconnect()
    desk.connect()
    assert desk.states == [LIVE, DOWN]
    desk.live(*seqs, life=life)
    desk.wait(1)
    assert (desk.known, desk.states) == (known, [LIVE, DOWN, state])


def test_a_replay_that_is_refused_is_tried_4_times_in_15_seconds_and_then_the_feed_is_lost() -> None:
    desk = following(2)
    desk.live(3)
    desk.wait(0.5)
    began = desk.now
    desk.wait(14.9)
    assert desk.states == [LIVE]
    desk.wait(0.2)
    assert (desk.states, desk.seqs) == ([LIVE, LOST], [3])
    assert desk.asked == [0, 1, 1, 1, 1]  # 2 s each, and 1, 2 and 4 s between them
    assert 15.0 <= desk.now - began <= 15.2
    desk.live(4)
    assert desk.seqs == [3, 4]


def test_a_lost_feed_asks_for_everything_less_and_less_often_and_is_live_again_when_it_comes() -> None:
    desk = following(2)
    desk.live(3)
    desk.wait(16)
    assert desk.states == [LIVE, LOST]
    began = desk.now
    for number, after_s in enumerate((30, 62 + 30, 122 + 62 + 30)):
        desk.wait(began + after_s - 2 - desk.now)
        assert len(desk.asked) == 5 + number
        desk.wait(3)
        assert desk.asked[5:] == [0] * (number + 1)
    assert desk.seqs == [3]
    desk.live(4)
    desk.replay(0, 1, 2, 3, 4)
    assert (desk.seqs, desk.states) == ([0, 1, 2, 3, 4], [LIVE, LOST, LIVE])
    desk.wait(1_000)
    assert desk.sequencer.due is None


def test_a_replay_with_the_same_gap_for_ever_ends_lost() -> None:
    desk = following(2)
    desk.live(5)
    began = desk.now
    while desk.sequencer.state is LIVE:
        desk.wait(0.1)
        if desk.sequencer.asking is not None:
            desk.replay(1, 3, 4, 5)  # never 2
    assert desk.now - began < 8.5  # 0.5 s, and 1, 2 and 4 s between the tries
    assert desk.seqs == [3, 4, 5]
    asked = len(desk.asked)
    for _ in range(1_000):
        desk.wait(1.0)
        if desk.sequencer.asking is not None:
            desk.replay(*(seq for seq in (0, 1, 3, 4, 5) if seq >= desk.sequencer.asking.start))
    assert desk.sequencer.state is LOST
    assert len(desk.asked) - asked < 30  # 5 an attempt, and fewer and fewer of them
    assert desk.seqs == [3, 4, 5]


def test_a_replay_that_lost_its_middle_is_asked_for_the_rest_at_once() -> None:
    desk = following(2)
    desk.live(9)
    desk.wait(0.5)
    desk.replay(1, 2, 3, 6, 7)
    assert desk.asked == [0, 1, 3]
    desk.replay(3, 4, 5, 6, 7, 8, 9)
    assert (desk.seqs, desk.states) == (list(range(10)), [LIVE])


def test_a_replay_whose_end_is_lost_is_asked_for_the_rest() -> None:
    desk = following(2)
    desk.live(4)
    desk.wait(0.5)
    desk.replay(1, 2, end=False)
    desk.wait(2.1)
    assert desk.asked == [0, 1, 2]
    desk.replay(2, 3, 4)
    assert desk.seqs == [0, 1, 2, 3, 4]


def test_a_replay_that_goes_on_is_waited_for_and_one_that_stops_is_not() -> None:
    desk = following(2)
    desk.live(9)
    desk.wait(0.5)
    for seq in (1, 2, 3):
        desk.replay(seq, end=False)
        desk.wait(1.9)
    assert desk.asked == [0, 1]
    desk.wait(0.2)
    assert desk.asked == [0, 1, 3]


def test_more_missing_than_the_engine_keeps_is_lost_at_once_and_what_it_keeps_is_applied() -> None:
    desk = following(2)
    desk.live(50)
    desk.wait(0.5)
    desk.replay(*range(40, 51))
    assert (desk.seqs, desk.states, desk.sequencer.complete) == (list(range(40, 51)), [LIVE, LOST], False)


@pytest.mark.parametrize("upto", [5, 100])
def test_an_engine_that_begins_again_at_0_was_restarted(upto: int) -> None:
    desk = following(upto)
    asked = list(desk.asked)
    desk.live(0, 1, life=1)
    assert (desk.known, desk.states, desk.sequencer.complete) == ([(1, 0), (1, 1)], [LIVE], True)
    desk.counted(restarts=1, gaps=0)
    assert desk.asked == asked


def test_an_engine_that_passed_our_number_before_we_saw_it_is_told_from_a_gap_by_what_we_saw_last() -> None:
    desk = following(3)
    desk.live(7, life=1)
    desk.wait(0.5)
    desk.replay(2, life=1, end=False)
    assert desk.known == []
    assert desk.asked == [0, 2, 0]
    desk.live(8, life=1)
    desk.replay(*range(8), life=1)
    assert desk.known == [(1, seq) for seq in range(9)]
    desk.counted(restarts=1, lost=0)


def test_a_reconnection_asks_from_the_last_message_seen() -> None:
    desk = following(3)
    desk.disconnect()
    assert desk.states == [LIVE, DOWN]
    desk.connect()
    assert desk.asked == [0, 2]
    desk.replay(2, 3)
    assert (desk.seqs, desk.states) == ([0, 1, 2, 3], [LIVE, DOWN, LIVE])
    desk.counted(restarts=0)


def test_after_a_reconnection_an_engine_that_has_nothing_of_ours_was_restarted() -> None:
    desk = following(3)
    desk.disconnect()
    desk.connect()
    desk.replay()
    assert (desk.known, desk.asked) == ([], [0, 2, 0])
    desk.replay()
    assert (desk.states, desk.sequencer.complete) == ([LIVE, DOWN, LIVE], True)
    desk.live(0, life=1)
    assert desk.known == [(1, 0)]


def test_a_number_that_is_too_old_to_be_remembered_is_a_repetition_unless_the_replay_tells_otherwise() -> None:
    desk = following(100)
    desk.live(20)
    assert desk.asked == [0, 99]
    desk.replay(99)
    assert desk.seqs == list(range(100))
    desk.live(21, life=1)
    desk.replay(*(), life=1)
    desk.replay(*range(22), life=1)
    assert desk.known == [(1, seq) for seq in range(22)]
    assert desk.states == [LIVE]


def test_what_was_said_before_a_disconnection_counts_only_in_order() -> None:
    desk = following(2)
    desk.disconnect()
    desk.live(2, 9)
    assert desk.seqs == [0, 1, 2]
    desk.connect()
    desk.replay(2, 3)
    assert desk.seqs == [0, 1, 2, 3]
    desk.wait(60)
    desk.counted(gaps=0)


@pytest.mark.parametrize("bound", [{"held_messages": 10}, {"held_bytes": 1_000}])
def test_what_is_held_during_a_replay_is_bounded(bound: dict[str, int]) -> None:
    desk = Desk(patience=Patience(**bound))  # type: ignore[arg-type]
    desk.connect()
    desk.live(*range(100, 110))
    assert desk.states == []
    desk.live(110)
    assert (desk.states, desk.seqs) == ([LOST], list(range(100, 111)))
    desk.replay(0, 1)  # nobody wants it any more
    assert desk.seqs == list(range(100, 111))


# ---- the sequencer, against an engine that does anything ----


@dataclass(slots=True)
class World:
    """An engine that keeps its last `keeps` messages, and a network that does as it is told."""

    desk: Desk
    keeps: int
    life: int = 0
    said: int = 0
    up: bool = True

    def publish(self, how: str) -> None:
        seq, self.said = self.said, self.said + 1
        if self.up and how != "lose":
            self.desk.live(*([seq] * (2 if how == "twice" else 1)), life=self.life)

    def late(self) -> None:
        """Two messages change places."""
        self.said += 2
        if self.up:
            self.desk.live(self.said - 1, self.said - 2, life=self.life)

    def restart(self) -> None:
        """Seen as a disconnection, or by the first message of the new life when nothing is outstanding."""
        self.life, self.said = self.life + 1, 0
        if self.up and self.desk.sequencer.due is not None:
            self.toggle()
            self.toggle()
        elif self.up:
            self.publish("say")

    def toggle(self) -> None:
        self.up = not self.up
        if self.up:
            self.desk.do(self.desk.sequencer.connected(self.desk.now))
        else:
            self.desk.disconnect()

    def answer(self, upto: int | None = None) -> None:
        """The replay that is wanted, if one is; `upto` messages of it, and then nothing more."""
        ask = self.desk.sequencer.asking
        if ask is None:
            return
        there = range(max(ask.start, self.said - self.keeps), self.said)
        for seq in there[:upto]:
            if self.desk.sequencer.asking is ask:
                self.desk.replay(seq, life=self.life, end=False)
        if upto is None and self.desk.sequencer.asking is ask:
            self.desk.replay()


_STEPS = st.one_of(
    st.sampled_from(["say", "say", "say", "twice", "lose", "late", "restart", "toggle", "answer", "wait"]),
    st.integers(0, 5),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 200), st.lists(_STEPS, max_size=60))
def test_whatever_happens_what_is_known_in_the_end_is_what_the_engine_did(keeps: int, steps: list[str | int]) -> None:
    world = World(Desk(), keeps)
    world.desk.do(world.desk.sequencer.connected(0.0))
    for step in steps:
        match step:
            case int():
                world.answer(step)
            case "say" | "twice" | "lose":
                world.publish(str(step))
            case "late":
                world.late()
            case "restart":
                world.restart()
            case "toggle":
                world.toggle()
            case "answer":
                world.answer()
            case _:
                world.desk.wait(0.3)
        known = world.desk.known
        assert all(before < after for before, after in pairwise(known)), "each once, in order"
    if not world.up:
        world.toggle()
    world.publish("say")
    for _ in range(200):
        world.desk.wait(0.5)
        world.answer()
    desk = world.desk
    assert desk.sequencer.state is LIVE
    everything = [(world.life, seq) for seq in range(world.said)]
    if desk.sequencer.complete:
        assert desk.known == everything
    else:
        assert desk.known == everything[len(everything) - len(desk.known) :]
        assert len(desk.known) >= min(keeps, world.said)
    assert not desk.sequencer._held
    assert desk.sequencer.due is None


# ---- the captures ----


def captured(name: str, **wanted: object) -> Iterator[dict[str, object]]:
    if CAPTURES.exists():
        for line in (CAPTURES / name).read_text().splitlines():
            record = json.loads(line)
            if all(record.get(key) == value for key, value in wanted.items()):
                yield record


def _read(parts: Sequence[str]) -> Message:
    frame = frames([bytes.fromhex(part) for part in parts])
    return Message(frame.seq, hash(frame.payload), len(frame.payload), (BlocksRemoved((frame.seq,), "gpu", 0),))


@pytest.mark.parametrize("pod", ["pod1", "pod2", "pod3", "pod4"])
def test_captured_feeds_and_replays_of_real_engines_meet_in_one_order(pod: str) -> None:
    events = [
        _read([record["topic_hex"], record["seq_hex"], record["payload_hex"]])  # type: ignore[list-item]
        for record in captured("vllm_kv_events.jsonl", type="kv_event", pod=pod)
    ]
    for replay in captured("vllm_kv_events.jsonl", type="replay", pod=pod):
        *said, end = [_read(parts) for parts in replay["frames_hex"]]  # type: ignore[attr-defined]
        assert end.seq == 2**64 - 1
        desk = Desk()
        desk.connect()
        for heard in events[: replay["start"]]:  # type: ignore[misc]
            desk.do(desk.sequencer.live(heard, 0.0))
        for again in said:
            desk.do(desk.sequencer.replayed(again, 0.0))
        desk.do(desk.sequencer.replay_ended(0.0))
        for heard in events:
            desk.do(desk.sequencer.live(heard, 0.0))
        desk.wait(0)
        assert desk.seqs == sorted(set(desk.seqs))
        if replay["start"] == 0:
            assert desk.seqs == [heard.seq for heard in events]
            desk.counted(gaps=0, restarts=0)


def test_the_captured_restart_is_one() -> None:
    records = list(captured("vllm_kv_events_restart.jsonl"))
    heard = [_read([r["topic_hex"], r["seq_hex"], r["payload_hex"]]) for r in records]  # type: ignore[list-item]
    desk = Desk(replay=False)
    desk.connect()
    for one in heard:
        desk.do(desk.sequencer.live(one, 0.0))
    if heard:
        assert (desk.seqs, desk.sequencer.complete) == ([0], True)
        desk.counted(restarts=1)


# ---- real sockets ----


@dataclass(slots=True)
class Engine:
    """Publishes and replays as vLLM does, and misbehaves when told to."""

    context: zmq.asyncio.Context
    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    seq: int = 0
    rank: int | None = 0
    old_replies: bool = False
    refuse: bool = False
    hidden: set[int] = field(default_factory=set)
    """Never published nor replayed."""
    requests: list[int] = field(default_factory=list)

    def made(self, blocks: int = 1) -> tuple[int, bytes]:
        """The next message; its event removes blocks whose first has its sequence number."""
        seq, self.seq = self.seq, self.seq + 1
        hashes = [seq, *range(1_000_000, 1_000_000 + blocks - 1)]
        event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
        made = seq, msgspec.msgpack.encode([time.time(), [event], self.rank])
        if seq not in self.hidden:
            self.kept.append(made)
        return made

    async def send(self, made: tuple[int, bytes]) -> None:
        await self.pub.send_multipart((b"kv@n@m", made[0].to_bytes(8, "big"), made[1]))

    async def publish(self, count: int = 1, *, blocks: int = 1) -> None:
        for _ in range(count):
            await self.send(self.made(blocks))

    async def replays(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            if self.refuse:
                continue
            topic = () if self.old_replies else (b"kv@n@m",)
            for seq, payload in self.kept:
                if seq >= self.requests[-1]:
                    await self.router.send_multipart((client, b"", *topic, seq.to_bytes(8, "big"), payload))
            await self.router.send_multipart((client, b"", *(b"" for _ in topic), b"\xff" * 8, b""))


@dataclass(slots=True)
class Seen:
    """The sink: what each node is known to have done since it was last cleared, and its states with their times."""

    known: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, list[FeedState]] = field(default_factory=dict)
    largest: int = 0

    def cache_events(self, pool: str, node: str, events: Sequence[CacheEvent], *, now: float) -> None:
        assert pool == "m"
        self.largest = max(self.largest, sum(len(getattr(event, "hashes", ())) for event in events))
        seqs = self.known.setdefault(node, [])
        for event in events:
            if isinstance(event, CacheCleared):
                seqs.clear()
            else:
                seqs += [one for one in event.hashes if isinstance(one, int) and one < 1_000_000]

    def feed(self, pool: str, node: str, state: FeedState, *, now: float) -> None:
        self.states.setdefault(node, []).append(state)

    def has(self, *seqs: int, node: str = "n1") -> Callable[[], bool]:
        return lambda: self.known.get(node, []) == list(seqs)

    def is_(self, state: FeedState, node: str = "n1") -> Callable[[], bool]:
        return lambda: self.states.get(node, [None])[-1] is state


PATIENCE = Patience(reorder_s=0.1, settle_s=0.02, replay_s=0.2, tries=3, back_off_s=0.05, heal_s=60.0)


@asynccontextmanager
async def engine(events: str, replay: str, *, connects: bool = False, send_queue: int = 1_000) -> AsyncIterator[Engine]:
    with zmq.asyncio.Context() as context:
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        router.set(zmq.SNDHWM, send_queue)
        (pub.connect if connects else pub.bind)(events)
        router.bind(replay)
        made = Engine(context, pub, router)
        replays = asyncio.create_task(made.replays())
        try:
            yield made
        finally:
            replays.cancel()
            await asyncio.gather(replays, return_exceptions=True)
            made.pub.close(linger=0)
            router.close(linger=0)


@asynccontextmanager
async def feeding(*endpoints: Endpoint, patience: Patience = PATIENCE) -> AsyncIterator[tuple[Seen, KvFeed]]:
    seen = Seen()
    feed = KvFeed(seen, time.monotonic, patience=patience)
    feed.replace(endpoints)
    try:
        yield seen, feed
    finally:
        await feed.close()


@pytest.fixture
def addresses(tmp_path: Path) -> Callable[[str], str]:
    return lambda name: f"ipc://{tmp_path}/{name}"


def free_ports(count: int) -> int:
    """The first of so many that are free in a row."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + offset))
        except OSError:
            continue
        else:
            return first
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


@contextmanager
def taking(*, at_most_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < at_most_s


@pytest.fixture
def endpoint(addresses: Callable[[str], str]) -> Endpoint:
    return Endpoint("m", "n1", addresses("events"), addresses("replay"), topic="kv@")


def start(endpoint: Endpoint, *, send_queue: int = 1_000) -> AbstractAsyncContextManager[Engine]:
    assert endpoint.replay is not None
    return engine(endpoint.events, endpoint.replay, send_queue=send_queue)


@pytest.mark.parametrize("old_replies", [False, True])
async def test_a_late_start_is_live_with_all_that_the_engine_keeps(endpoint: Endpoint, old_replies: bool) -> None:
    async with start(endpoint) as node:
        node.old_replies = old_replies
        await node.publish(5)
        with taking(at_most_s=2.0):
            async with feeding(endpoint) as (seen, feed):
                await until(seen.is_(LIVE))
                assert seen.has(0, 1, 2, 3, 4)()
                await node.publish()
                await until(seen.has(0, 1, 2, 3, 4, 5))
                assert seen.states["n1"] == [LIVE]
                assert feed.statuses()[endpoint].complete


@pytest.mark.parametrize("connects", [False, True])
async def test_it_connects_to_an_engine_that_binds_and_binds_for_one_that_connects(
    addresses: Callable[[str], str], connects: bool
) -> None:
    port = free_ports(2)
    replay = f"tcp://127.0.0.1:{port + 1}"
    endpoint = Endpoint("m", "n1", f"tcp://127.0.0.1:{port}", replay, bind=connects)
    async with feeding(endpoint) as (seen, _), engine(endpoint.events, replay, connects=connects) as node:
        await until(seen.is_(LIVE))
        await node.publish(3)
        await until(seen.has(0, 1, 2))


async def test_without_a_replay_endpoint_it_is_down_until_the_first_message(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(replace(endpoint, replay=None)) as (seen, _):
        while not seen.states:
            await node.publish()
            await asyncio.sleep(0.01)
        assert seen.states["n1"] == [LIVE]
        await until(lambda: seen.known["n1"][-1:] == [node.seq - 1])
        assert node.requests == []


async def test_a_feed_that_is_cut_is_down_and_is_live_again_with_what_it_missed(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        await node.publish(2)
        await until(seen.has(0, 1))
        with taking(at_most_s=1.0):
            node.pub.unbind(endpoint.events)
            node.pub.close(linger=0)
            await until(seen.is_(DOWN))
        missed = [node.made(), node.made()]
        assert [seq for seq, _ in missed] == [2, 3]
        with taking(at_most_s=2.0):
            node.pub = node.context.socket(zmq.PUB)
            node.pub.bind(endpoint.events)
            await until(seen.has(0, 1, 2, 3))
        assert seen.states["n1"] == [LIVE, DOWN, LIVE]
        assert feed.counters()["restarts"] == 0


async def test_a_restarted_engine_begins_with_nothing_known(endpoint: Endpoint) -> None:
    async with feeding(endpoint) as (seen, feed):
        async with start(endpoint) as node:
            await until(seen.is_(LIVE))
            await node.publish(3)
            await until(seen.has(0, 1, 2))
        await until(seen.is_(DOWN))
        async with start(endpoint) as node:
            node.made(), node.made(), node.made(), node.made()
            with taking(at_most_s=2.0):
                await until(seen.is_(LIVE))
            assert seen.has(0, 1, 2, 3)()
            assert feed.counters()["restarts"] == 1
            assert node.requests == [2, 0]


async def test_a_feed_that_begins_again_at_0_without_a_disconnection_is_a_restart(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        await node.publish(3)
        await until(seen.has(0, 1, 2))
        node.seq, node.kept = 0, []
        await node.publish(2, blocks=2)
        await until(seen.has(0, 1))
        assert (seen.states["n1"], feed.counters()["restarts"]) == ([LIVE], 1)


async def test_a_feed_that_repeats_and_reorders_stays_live(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        made = [node.made() for _ in range(6)]
        for at in (1, 0, 0, 3, 2, 3, 5, 4, 1):
            await node.send(made[at])
        await until(seen.has(0, 1, 2, 3, 4, 5))
        await until(lambda: feed.counters()["duplicates"] == 3)
        assert (seen.states["n1"], feed.counters()["gaps"], node.requests) == ([LIVE], 0, [0])


async def test_a_message_that_is_delayed_is_replayed_and_then_no_news(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        late = node.made()
        with taking(at_most_s=1.0):
            await node.publish()
            await until(seen.has(0, 1))
        await node.send(late)
        await until(lambda: feed.counters()["duplicates"] == 1)
        assert (seen.states["n1"], feed.counters()["gaps"]) == ([LIVE], 1)


async def test_a_whole_feed_that_is_delayed_stays_live_and_its_lag_shows(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        await node.publish()
        await until(seen.has(0))
        assert feed.statuses()[endpoint].lag_s == 0.0
        late = node.made()
        old = msgspec.msgpack.encode([time.time() - 10, *msgspec.msgpack.decode(late[1])[1:]])
        await node.send((late[0], old))
        await until(seen.has(0, 1))
        assert feed.statuses()[endpoint].lag_s == pytest.approx(10, abs=0.5)
        assert seen.states["n1"] == [LIVE]


async def test_a_gap_whose_replay_is_refused_ends_lost_and_goes_on_from_there(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, _):
        await until(seen.is_(LIVE))
        await node.publish()
        await until(seen.has(0))
        node.refuse = True
        node.made()
        # 0.1 s of waiting for the order, three tries of 0.2 s, 0.05 and 0.1 s between them
        with taking(at_most_s=2.0):
            await node.publish()
            await until(seen.is_(LOST))
        assert seen.has(2)()
        assert node.requests == [0, 0, 0, 0]
        await node.publish()
        await until(seen.has(2, 3))


async def test_a_replay_with_the_same_gap_for_ever_ends_lost_and_goes_on_from_there(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, _):
        await until(seen.is_(LIVE))
        node.hidden = {1}
        await node.publish()
        await until(seen.has(0))
        node.made()
        with taking(at_most_s=2.0):
            await node.publish(2)
            await until(seen.is_(LOST))
        assert seen.has(2, 3)()
        requests = len(node.requests)
        await node.publish()
        await until(seen.has(2, 3, 4))
        assert len(node.requests) == requests == 4


async def test_an_engine_whose_replay_nobody_answers_is_followed_without(endpoint: Endpoint) -> None:
    there_is_none = replace(endpoint, replay=f"tcp://127.0.0.1:{free_ports(1)}")
    async with start(endpoint) as node, feeding(there_is_none) as (seen, _):
        with taking(at_most_s=3.0):
            while not seen.states:
                await node.publish()
                await asyncio.sleep(0.01)
        assert seen.states["n1"] == [LOST]


async def test_a_lost_feed_heals_when_the_engine_replays_again(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint, patience=replace(PATIENCE, heal_s=0.3)) as (seen, _):
        node.refuse = True
        await node.publish(2)
        await until(seen.is_(LOST))
        node.refuse = False
        with taking(at_most_s=10.0):
            await until(seen.is_(LIVE))
        assert seen.has(0, 1)()


async def test_a_replay_that_is_longer_than_the_engine_can_queue_arrives_in_pieces(endpoint: Endpoint) -> None:
    async with start(endpoint, send_queue=50) as node:
        for _ in range(3_000):
            node.made(blocks=300)
        async with feeding(endpoint) as (seen, feed):
            await until(lambda: seen.is_(LIVE)())
            assert seen.known["n1"] == list(range(3_000))
            assert feed.counters()["lost"] == 0


async def test_two_ranks_have_ports_of_their_own(addresses: Callable[[str], str]) -> None:
    port = free_ports(4)
    first = Endpoint("m", "n1", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 2}", rank=0)
    second = first.of_rank(1, node="n1@1")
    assert (second.events, second.replay) == (f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 3}")
    async with (
        engine(first.events, first.replay or "") as one,
        engine(second.events, second.replay or "") as two,
        feeding(first, second) as (seen, _),
    ):
        two.rank = 1
        await until(lambda: seen.is_(LIVE, "n1")() and seen.is_(LIVE, "n1@1")())
        await one.publish(3)
        await two.publish(1)
        await until(seen.has(0, 1, 2, node="n1"))
        await until(seen.has(0, node="n1@1"))


async def test_two_ranks_behind_one_address_are_told_apart_by_what_they_say(endpoint: Endpoint) -> None:
    ranks = [replace(endpoint, node=f"n1@{rank}", rank=rank) for rank in (0, 1)]
    async with start(endpoint) as node, feeding(*ranks) as (seen, _):
        await until(lambda: seen.is_(LIVE, "n1@0")() and seen.is_(LIVE, "n1@1")())
        for rank, seqs in ((0, [0, 1, 2]), (1, [0, 1])):
            node.rank, node.seq = rank, 0
            await node.publish(len(seqs))
            await until(seen.has(*seqs, node=f"n1@{rank}"))
        assert seen.known == {"n1@0": [0, 1, 2], "n1@1": [0, 1]}


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://h:65535", "tcp://h:*", "tcp://h"])
def test_a_rank_without_a_port_of_its_own_is_refused(address: str) -> None:
    endpoint = Endpoint("m", "n", address)
    assert endpoint.of_rank(0, node="n").events == address
    with pytest.raises(ValueError, match="rank 1 has no port of its own"):
        endpoint.of_rank(1, node="n@1")


async def test_what_is_not_a_message_is_counted_and_does_not_stop_the_feed(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        await node.pub.send_multipart((b"kv@n@m",))
        await node.pub.send_multipart((b"kv@n@m", b"", b""))
        await node.pub.send_multipart((b"kv@n@m", b"12345678", b"x", b"y", b"z"))
        node.seq += 1
        await node.send((0, b"no batch"))
        await node.publish()
        await until(seen.has(1))
        assert (feed.counters()["skipped"], feed.counters()["gaps"]) == (4, 0)


async def test_a_long_message_reaches_the_sink_in_pieces_and_the_loop_goes_on(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, _):
        await until(seen.is_(LIVE))
        longest = 0.0

        async def beat() -> None:
            nonlocal longest
            while True:
                began = time.monotonic()
                await asyncio.sleep(0)
                longest = max(longest, time.monotonic() - began)

        made = node.made(blocks=200_000)
        beating = asyncio.create_task(beat())
        try:
            await node.send(made)
            await until(seen.has(0))
        finally:
            beating.cancel()
        assert seen.largest == 1_000
        # decoded at once it takes 30 ms; two busy cores are shared with others
        assert longest < 0.25


async def test_a_feed_that_is_replaced_is_closed_and_what_it_told_is_void(endpoint: Endpoint) -> None:
    async with start(endpoint) as node, feeding(endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        await node.publish(2)
        await until(seen.has(0, 1))
        feed.replace([endpoint])
        assert seen.has(0, 1)()
        feed.replace([])
        assert (seen.known["n1"], seen.states["n1"]) == ([], [LIVE, DOWN])
        received = feed.counters()["received"]
        assert received >= 2
        feed.replace([replace(endpoint, generation=1)])
        await until(seen.has(0, 1))
        assert feed.counters()["received"] > received


async def test_an_address_that_is_taken_is_tried_until_it_is_free(endpoint: Endpoint) -> None:
    port = free_ports(2)
    events, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    with zmq.Context() as context:
        squatter = context.socket(zmq.SUB)
        squatter.bind(events)
        async with feeding(Endpoint("m", "n1", events, replay, bind=True)) as (seen, _):
            await asyncio.sleep(0.05)
            squatter.close(linger=0)
            async with engine(events, replay, connects=True):
                await until(seen.is_(LIVE))


async def test_an_address_that_is_none_harms_nobody_else(endpoint: Endpoint) -> None:
    async with start(endpoint), feeding(Endpoint("m", "n2", "nonsense"), endpoint) as (seen, feed):
        await until(seen.is_(LIVE))
        assert [status.state for status in feed.statuses().values()] == [DOWN, LIVE]
