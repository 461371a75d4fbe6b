"""What every trace promises, as the tests of all readers and generators check it."""

import pytest

from extproc.core.types import HASH_BYTES
from extproc.lab.replay.types import Trace


def blocks(chain: bytes) -> list[bytes]:
    return [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]


def check(trace: Trace) -> None:
    """What every trace promises."""
    assert trace.calls[0].at_s == 0.0
    before_s = 0.0
    parents: dict[bytes, bytes | None] = {}
    for number, call in enumerate(trace.calls):
        assert call.at_s >= before_s
        before_s = call.at_s
        assert call.after is None or (0 <= call.after < number and call.pause_s >= 0.0)
        if call.after is not None:
            waited = trace.calls[call.after]
            assert call.at_s == pytest.approx(waited.at_s + call.pause_s)
            assert call.session == waited.session
        assert call.answer_tokens >= 1
        assert call.blocks == call.prompt_tokens // trace.block_tokens
        whole = blocks(call.chain + call.answer)
        assert len(whole) == (call.prompt_tokens + call.answer_tokens) // trace.block_tokens
        parent = None
        for block in whole:  # equal hash, equal prefix: no hash has two parents
            assert parents.setdefault(block, parent) == parent
            parent = block
