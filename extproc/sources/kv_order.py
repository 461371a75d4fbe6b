"""In what order a feed's messages are applied, what is missing, and what is done about it: no I/O, no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from extproc.core.types import CacheCleared, CacheEvent, FeedState

COUNTERS = ("received", "skipped", "duplicates", "gaps", "replays", "restarts", "lost")
"""What is counted of a feed: messages, events and messages not understood, messages seen before, gaps, replays asked
for, restarts of the engine, and gaps that could not be repaired."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a feed waits for what, and how much it keeps meanwhile."""

    reorder_s: float = 0.5
    reorder_messages: int = 64
    """A message that comes late by more than either is missing."""
    settle_s: float = 0.05
    """From the connection until the replay is asked for: the engine has the subscription by then."""
    replay_s: float = 2.0
    """A replay that says nothing for so long has failed. Engines look for requests every 0.1 s."""
    tries: int = 4
    back_off_s: float = 1.0
    back_off_max_s: float = 30.0
    heal_s: float = 30.0
    """One that is lost asks for all that the engine can still replay, so long after and then less often (to 16)."""
    held_messages: int = 10_000
    held_bytes: int = 16 << 20
    """Encoded; four times that at most when decoded."""


class Message(NamedTuple):
    """One message, as far as its order is concerned."""

    seq: int
    digest: int
    """Of its payload: two messages of one sequence number with different ones are of two lives of an engine."""
    size: int
    events: tuple[CacheEvent, ...]


@dataclass(eq=False, slots=True)
class Ask:
    """A request for everything from `start` on."""

    start: int
    fresh: bool
    """As if nothing were known; otherwise `start` is the last message seen, and is compared."""
    until: float
    answered: bool = False
    moved: bool = False
    """It brought something new."""


Action: TypeAlias = CacheEvent | FeedState | Ask


class Sequencer:
    """Says what to apply in which order: each message once, and what to do where one is missing.

    Every call returns what is to be done, in order: events to apply (CacheCleared among them where what was known is
    void), a new state of the feed, a replay to ask for. The replay that is wanted is `asking`; what another one
    answers is not to be passed on. Call `tick` when it is `due`.
    """

    def __init__(self, *, replay: bool, patience: Patience | None = None) -> None:
        self.state = FeedState.DOWN
        self.complete = False
        """What was applied since the last CacheCleared is all that the engine did since its cache was empty."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.asking: Ask | None = None
        self._replay = replay
        self._patience = patience or Patience()
        self._connected = False
        self._lost = False
        self._next: int | None = None
        """The sequence number to apply; None: whichever comes first."""
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Digests of the last `reorder_messages` messages applied."""
        self._first: int | None = None
        """That of message 0."""
        self._held: dict[int, Message] = {}
        self._held_bytes = 0
        self._held_since = 0.0
        self._retry_at: float | None = None
        self._tries = 0
        self._from_start = False
        """All that the engine keeps is being replayed, and so far nothing of it was missing."""
        self._heal_at: float | None = None
        self._heals = 0
        """Attempts since it was lost."""
        self._out: list[Action] = []

    @property
    def due(self) -> float | None:
        """When `tick` has something to do; None: when something else happened first."""
        if self.asking is not None:
            return self.asking.until
        if self._retry_at is not None:
            return self._retry_at
        if self._held:
            late = self._held_since + self._patience.reorder_s
            return late if self._heal_at is None else min(late, self._heal_at)
        return self._heal_at

    def connected(self, now: float) -> list[Action]:
        """The engine can be heard: what it said before has to be asked for."""
        self._connected = True
        self._abandon()
        if self._replay:
            self._retry_at = now + self._patience.settle_s
        return self._done()

    def disconnected(self) -> list[Action]:
        """It cannot. What is held is dropped: it is replayed, or its numbers are used again by another life."""
        self._connected = False
        self._abandon()
        self._held.clear()
        self._held_bytes = 0
        self._heal_at = None
        self._say(FeedState.DOWN)
        return self._done()

    def live(self, message: Message, now: float) -> list[Action]:
        """A message as it was published."""
        self.counters["received"] += 1
        if self._next is not None and message.seq < self._next:
            self._old(message, now)
        elif not self._connected:
            # said before the connection broke: in order it is as good as ever, out of order it will be replayed
            if message.seq == self._next:
                self._apply(message)
        elif self._repairing:
            self._hold(message, now)
        elif self._next is None or message.seq == self._next:
            self._apply(message)
            self._drain(now)
            self._up()
        else:
            self._hold(message, now)
            if len(self._held) > self._patience.reorder_messages:
                self._gap(now)
        return self._done()

    def replayed(self, message: Message, now: float) -> list[Action]:
        """A message of the replay that is wanted."""
        ask = self.asking
        if ask is None or message.seq < ask.start:
            return []
        self.counters["received"] += 1
        ask.until = now + self._patience.replay_s
        if not ask.answered:
            ask.answered = True
            if ask.fresh:
                if self._next is not None:
                    self._void()
                self._next = message.seq
            elif message.seq > ask.start:
                # what was seen last is kept no longer: so much was missed that it cannot be told from another life
                self._lose(now)
                self._next = message.seq
            elif message.digest != self._seen.get(message.seq):
                self._restarted(now)
                return self._done()
        if message.seq == self._next:
            self._unhold(message.seq)
            self._apply(message)
            ask.moved = True
        elif self._next is not None and message.seq > self._next and self._room_for(message):
            # An engine drops the middle of what it replays faster than we read; the rest is asked for when it ends.
            self._keep(message, now)
        return self._done()

    def replay_ended(self, now: float) -> list[Action]:
        """The replay that is wanted has said all it has."""
        ask, self.asking = self.asking, None
        if ask is None:
            return []
        if not ask.answered and not self._held and not ask.fresh:
            # an engine keeps its last message, so this one has published fewer than were seen: it is another life
            self._restarted(now)
            return self._done()
        if not ask.answered and self._next is None and (not self._held or 0 in self._held):
            self._next, self.complete = 0, True
        self._drain(now)
        if self._held or (not ask.answered and self._seen and ask.fresh):
            self._unsatisfied(ask, now)
            return self._done()
        if self._from_start:
            self._lost = self._from_start = False
        self._tries = 0
        self._heal_later(now)
        self._up()
        return self._done()

    def tick(self, now: float) -> list[Action]:
        """What has to be done because time passed."""
        due = self.due
        if due is None or now < due:
            return []
        ask, self.asking = self.asking, None
        if ask is not None:
            self._unsatisfied(ask, now)
        elif self._retry_at is not None:
            self._ask(now)
        elif self._heal_at is not None and now >= self._heal_at:
            self._heals += 1
            self._ask(now, fresh=True)
        else:
            self._gap(now)
        return self._done()

    @property
    def _repairing(self) -> bool:
        return self.asking is not None or self._retry_at is not None

    def _done(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _say(self, state: FeedState) -> None:
        if state is not self.state:
            self.state = state
            self._out.append(state)

    def _up(self) -> None:
        if self._connected:
            self._say(FeedState.LOST if self._lost else FeedState.LIVE)

    def _apply(self, message: Message) -> None:
        self._out += message.events
        self._next = message.seq + 1
        self._seen[message.seq] = message.digest
        if len(self._seen) > self._patience.reorder_messages:
            self._seen.popitem(last=False)
        if message.seq == 0:
            self._first, self.complete = message.digest, True
        if any(isinstance(event, CacheCleared) for event in message.events):
            self.complete, self._lost, self._heal_at = True, False, None
            if self.state is FeedState.LOST:
                self._up()

    def _hold(self, message: Message, now: float) -> None:
        if (known := self._held.get(message.seq)) is not None:
            if known.digest == message.digest:
                self.counters["duplicates"] += 1
            else:
                self._restarted(now, message)
            return
        room = self._room_for(message)
        self._keep(message, now)
        if not room:
            self._give_up(now)

    def _room_for(self, message: Message) -> bool:
        return (
            len(self._held) < self._patience.held_messages
            and self._held_bytes + message.size <= self._patience.held_bytes
        )

    def _keep(self, message: Message, now: float) -> None:
        if message.seq not in self._held:
            if not self._held:
                self._held_since = now
            self._held[message.seq] = message
            self._held_bytes += message.size

    def _unhold(self, seq: int) -> Message | None:
        message = self._held.pop(seq, None)
        if message is not None:
            self._held_bytes -= message.size
        return message

    def _drain(self, now: float) -> None:
        """Apply what is held and next. What is held after that follows a gap, which begins now."""
        if self._next is None or not self._held:
            return
        while (message := self._unhold(self._next)) is not None:
            self._apply(message)
        for seq in [seq for seq in self._held if seq < self._next]:
            self._unhold(seq)
        self._held_since = now

    def _old(self, message: Message, now: float) -> None:
        """One whose number was applied before: the same again, or another life of the engine."""
        known = self._first if message.seq == 0 else self._seen.get(message.seq)
        if known == message.digest:
            self.counters["duplicates"] += 1
        elif not self._connected:
            pass
        elif known is not None or message.seq == 0 or not self._replay:
            self._restarted(now, message)
        elif not self._repairing:
            # too old to be remembered: compared with what the engine replays, both cases can be told
            self._ask(now)

    def _restarted(self, now: float, message: Message | None = None) -> None:
        """The engine began anew, with an empty cache; `message` is what told."""
        self.counters["restarts"] += 1
        self._void()
        self._abandon()
        self._held.clear()
        self._held_bytes = 0
        self._lost, self._heal_at = False, None
        if message is not None and message.seq == 0:
            self._apply(message)
            self._up()
            return
        if message is not None:
            self._hold(message, now)
        if self._replay:
            self._ask(now)
        else:
            self._give_up(now)

    def _gap(self, now: float) -> None:
        self.counters["gaps"] += 1
        if self._replay:
            self._ask(now)
        else:
            self._give_up(now)

    def _ask(self, now: float, *, fresh: bool = False) -> None:
        self.counters["replays"] += 1
        self._retry_at = None
        fresh = fresh or not self._seen
        self._from_start = self._from_start or fresh
        self.asking = Ask(0 if fresh else next(reversed(self._seen)), fresh, now + self._patience.replay_s)
        self._out.append(self.asking)

    def _abandon(self) -> None:
        self.asking = self._retry_at = None
        self._tries = 0
        self._from_start = False

    def _unsatisfied(self, ask: Ask, now: float) -> None:
        """A replay did not bring all that is missing: asked again where it got on, less and less often where not."""
        if ask.moved:
            self._tries = 0
            self._ask(now)
            return
        if ask.fresh and not ask.answered and self._seen:
            # an attempt to heal; what was learnt since the loss is kept
            self._abandon()
            self._drain(now)
            self._heal_later(now)
            self._up()
            return
        self._tries += 1
        if self._tries >= self._patience.tries:
            self._give_up(now)
        else:
            back_off_s = self._patience.back_off_s * 2 ** (self._tries - 1)
            self._retry_at = now + min(back_off_s, self._patience.back_off_max_s)

    def _void(self) -> None:
        """What was known is no longer so."""
        self._out.append(CacheCleared())
        self.complete = False
        self._seen.clear()
        self._first = self._next = None

    def _lose(self, now: float) -> None:
        self.counters["lost"] += 1
        self._void()
        self._lost, self._from_start = True, False
        self._heal_later(now)
        self._up()

    def _heal_later(self, now: float) -> None:
        """An attempt can cost as much as all that the engine keeps, so they become fewer."""
        if self._lost and self._replay:
            self._heal_at = now + self._patience.heal_s * min(2**self._heals, 16)
        else:
            self._heal_at, self._heals = None, 0

    def _give_up(self, now: float) -> None:
        """What is missing stays missing: go on with what came after the last gap."""
        self._lose(now)
        self._abandon()
        for seq in sorted(self._held):
            if self._next is not None and seq != self._next:
                self._void()
            self._apply(self._held[seq])
        self._held.clear()
        self._held_bytes = 0
