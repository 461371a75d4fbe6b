"""How far to believe what we think a node holds: what was promised of it, against what its engine counted."""

from __future__ import annotations

from extproc.core.types import LoadSample, Rung

RUNGS = (Rung.EVENTS, Rung.PREDICTED, Rung.HASH, Rung.LOAD)
"""From the best knowledge to none."""

_WINDOW_S = 5.0
"""What was sent and what was counted do not begin and end together: over 25 scrapes that matters little."""
_MAX_WINDOW_S = 600.0
_EDGES = 4
"""The engine counts a prompt when it begins, we when it ends: a window in which as many times the prompts have ended as
are on their way is one in which that matters little."""
_MIN_TOKENS, _MIN_BLOCKS = 2_000, 4
"""Less is a prompt or two, of which the last block alone is some percent."""
_SHARE = 0.7
"""Of what the node computed we must have sent that much: what others send there is not ours to predict. What we sent
may seem more than all of it, as far as windows do not agree."""

_WEIGHT = 0.3
"""Of the last window: five windows are five sixths of the mean."""
_BAD, _GOOD = 0.25, 0.15
"""Of the prompts' tokens. A quarter is more than a node nearby gains by its shorter queue; between the two nothing
changes."""
_MIN_JUDGED = 5
_STEEP = 0.5
"""An over-promise of half of all prompts, twice in a row, needs no more proof."""
_HOLD_S, _MAX_HOLD_S = 30.0, 600.0
"""How long it has to be good before the next better rung is tried, doubled with each further rung that was lost."""
_USELESS = 0.1
"""Where hashing brings fewer hits than that, it is not worth an imbalance."""
_NOISE = 0.05
"""An over-promise up to that is what windows that do not agree can make."""

_MIN_CAPACITY = 0.1
_SHRINK, _GROW, _MAX_GROW, _SHRINK_AT = 0.5, 1.05, 1.25, 0.1
"""A map that promises too much is too large: at worst halved with each window, it is a tenth within 20 s, and needs
up to four minutes to grow back: less where more is found than was promised."""


class Trust:
    """One node's. `sent` is told what was promised, `observe` what was counted; everything else follows."""

    def __init__(self) -> None:
        self.depth = 0
        """The best rung that may be used, in RUNGS."""
        self.error = 0.0
        """Promised and counted differ by that share of the prompts' tokens; a weighted mean."""
        self.over = 0.0
        """As far as too much was promised."""
        self.hits = 0.0
        """The share of the prompts that was found cached."""
        self.capacity = 1.0
        """Of what the cache is said to hold, as much is believed."""
        self._judged = 0
        self._steep = 0
        self._drops = 0
        self._good_since_s: float | None = None
        self._judged_at_s: float | None = None
        self._begin: LoadSample | None = None
        self._promised = self._tokens = self._open = 0

    @property
    def value(self) -> float:
        """What a promised token is worth, in [0, 1]: nothing at an over-promise of one half."""
        return 1.0 - min(max(self.over - _NOISE, 0.0) / (_STEEP - _NOISE), 1.0)

    def begun(self, prompt_tokens: int) -> None:
        """A prompt of ours is on its way."""
        self._open += prompt_tokens

    def ended(self, prompt_tokens: int) -> None:
        """One that was begun is over, however that came."""
        self._open = max(self._open - prompt_tokens, 0)

    def sent(self, promised: int, prompt_tokens: int) -> None:
        """The node computed a prompt of ours, of which it was taken to hold `promised`."""
        self._promised += promised
        self._tokens += prompt_tokens

    def anew(self) -> None:
        """What it holds is known from the start again: nothing speaks against it."""
        self.depth = self._drops = self._open = 0
        self._turn()
        self._restart(None)

    def observe(self, sample: LoadSample, *, best: int, block_tokens: int) -> bool:
        """Take a scrape; True when that was enough to judge by. `best`: the best rung there is data for, in RUNGS."""
        if sample.prefix_queries is None or sample.prefix_hits is None:
            return False
        begin = self._begin
        if begin is None or begin.prefix_queries is None or begin.prefix_hits is None:
            self._restart(sample)
            return False
        span_s = sample.at_s - begin.at_s
        queries, hits = sample.prefix_queries - begin.prefix_queries, sample.prefix_hits - begin.prefix_hits
        if queries < 0 or hits < 0:  # a restart
            self._restart(sample)
            return False
        enough = max(_MIN_TOKENS, _MIN_BLOCKS * block_tokens, _EDGES * self._open)
        if span_s < _WINDOW_S or self._tokens < enough:
            if span_s > _MAX_WINDOW_S:
                self._restart(sample)
            return False
        counted = queries
        if sample.prompt_tokens is not None and begin.prompt_tokens is not None:
            counted = sample.prompt_tokens - begin.prompt_tokens
        ours, promised = self._tokens, self._promised / self._tokens
        self._restart(sample)
        if not queries or not _SHARE * counted < ours < counted / _SHARE:
            if self._judged_at_s is None:
                self._judged_at_s = sample.at_s
            elif sample.at_s - self._judged_at_s > _MAX_HOLD_S and self.depth > 0:  # an old verdict is none
                self.depth, self._judged_at_s = self.depth - 1, sample.at_s
                self._turn()
            return False
        self._judged_at_s = sample.at_s
        self._judge(promised, hits / queries, best, sample.at_s)
        return True

    def _restart(self, sample: LoadSample | None) -> None:
        self._begin, self._promised, self._tokens = sample, 0, 0

    def _judge(self, promised: float, actual: float, best: int, now: float) -> None:
        rung = max(best, self.depth)
        over = promised - actual
        self.hits += (actual - self.hits) * (_WEIGHT if self._judged else 1.0)
        self._judged += 1
        # what answers left there is promised by events alone
        missed = abs(over) if RUNGS[rung] is Rung.EVENTS else max(over, 0.0)
        self.error += _WEIGHT * (missed - self.error)
        self.over += _WEIGHT * (max(over, 0.0) - self.over)
        self._steep = self._steep + 1 if over > _STEEP else 0
        if RUNGS[rung] is not Rung.EVENTS:
            # one window's alone may be chance, unless it is large
            shrink = over if over > _BAD else self.over
            if over > _NOISE and shrink > _SHRINK_AT:
                self.capacity = max(self.capacity * max(1.0 - shrink, _SHRINK), _MIN_CAPACITY)
            elif over < _NOISE:
                self.capacity = min(self.capacity * max(_GROW, min(1.0 - over, _MAX_GROW)), 1.0)
        if self._steep > 1 or (self._judged >= _MIN_JUDGED and self.error > _BAD):
            last = RUNGS[rung] is Rung.LOAD or (RUNGS[rung] is Rung.HASH and self.hits >= _USELESS)
            if not last:
                self.depth = rung + 1
                self._drops += 1
            self._turn()
        elif self.error > _GOOD:
            self._good_since_s = None
        elif self._good_since_s is None:
            self._good_since_s = now
        elif now - self._good_since_s >= min(_HOLD_S * 2.0 ** max(self._drops - 1, 0), _MAX_HOLD_S):
            if rung > best:
                self.depth = rung - 1
                self._turn()
            elif now - self._good_since_s >= _MAX_HOLD_S:
                self._drops = 0

    def _turn(self) -> None:
        """Another rung is judged for itself."""
        self.error = self.over = 0.0
        self._judged = self._steep = 0
        self._good_since_s = None
