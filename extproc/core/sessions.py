"""Where each session was last: a hint, for what cannot be matched."""

from __future__ import annotations

import math
from collections import OrderedDict

from extproc.core.types import NodeId


class Sessions:
    """Session to node and prompt length, as last noted. Bounded: the least recently noted is dropped first."""

    def __init__(self, *, max_sessions: int = 100_000, ttl_s: float = 3600.0) -> None:
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        # Plain tuples of plain values: the garbage collector stops looking at them, however many there are.
        self._noted: OrderedDict[int, tuple[NodeId, int, float]] = OrderedDict()
        self._void: dict[NodeId, float] = {}
        """What was noted of a node until then does not count."""
        self._latest_s = -math.inf

    def __len__(self) -> int:
        return len(self._noted)

    def find(self, session: int, *, now: float) -> tuple[NodeId, int] | None:
        """The session's node and how long its prompt was; None when nothing is known, or not any more."""
        noted = self._noted.get(session)
        if noted is None:
            return None
        node, prompt_tokens, at_s = noted
        if now - at_s > self._ttl_s or at_s <= self._void.get(node, -math.inf):
            return None
        return node, prompt_tokens

    def note(self, session: int, node: NodeId, prompt_tokens: int, *, now: float) -> None:
        """The session is at `node`. `now` only has to grow."""
        self._latest_s = now
        self._noted[session] = (node, prompt_tokens, now)
        self._noted.move_to_end(session)
        for _ in range(2):  # more than come in, so that what is too old goes; not all at once, which could take long
            _, _, at_s = next(iter(self._noted.values()))
            if len(self._noted) <= self._max_sessions and now - at_s <= self._ttl_s:
                break
            self._noted.popitem(last=False)

    def forget(self, session: int, node: NodeId) -> None:
        """The session's request failed at `node`; one that is elsewhere by now stays."""
        noted = self._noted.get(session)
        if noted is not None and noted[0] == node:
            del self._noted[session]

    def move(self, session: int, left: NodeId, node: NodeId, prompt_tokens: int, *, now: float) -> None:
        """Its request to `left` was answered by `node`; a session that is elsewhere by now stays."""
        noted = self._noted.get(session)
        if noted is None or noted[0] == left:
            self.note(session, node, prompt_tokens, now=now)

    def void(self, node: NodeId) -> None:
        """`node` lost all it held, or left. O(nodes that did so within the time limit), not O(sessions)."""
        self._void = {each: at_s for each, at_s in self._void.items() if self._latest_s - at_s <= self._ttl_s}
        self._void[node] = self._latest_s
