"""Answers that nobody saw: in a prefix map they are blocks with a name of their own, until the next turn tells their
tokens."""

from __future__ import annotations

import math
from array import array

from xxhash import xxh3_64_intdigest

from extproc.core.types import Chain

REST, HELD = 1, 2
"""Blocks of an answer: those that are nobody's once the next turn has told its tokens; and where fewer are left of it,
it is gone."""

_WEIGHT = 0.02
"""Of one answer in the mean length: about the last fifty count."""
_MAX_BLOCKS = 256
"""More of one answer are not counted."""


class Answers:
    """How long a pool's answers are: it learns of those that are followed by another turn."""

    def __init__(self) -> None:
        self.mean_tokens = 0.0
        """0.0 before there was any."""

    def saw(self, tokens: int) -> None:
        """An answer was so long."""
        self.mean_tokens += (tokens - self.mean_tokens) * (_WEIGHT if self.mean_tokens else 1.0)

    def chain(self, turn: int, prompt_tokens: int, block_tokens: int) -> Chain:
        """What stands for the answer to a turn: as many blocks as it is expected to take behind its prompt. The first
        stands for the last of them, which is not full, so that nobody finds it, and takes its room all the same."""
        expected = math.ceil((prompt_tokens % block_tokens + self.mean_tokens) / block_tokens)
        return names(turn, min(max(expected, HELD), _MAX_BLOCKS))


def names(turn: int, blocks: int) -> Chain:
    """The first blocks of what stands for the answer to a turn."""
    return array("Q", [xxh3_64_intdigest(number.to_bytes(2), turn) for number in range(blocks)]).tobytes()
