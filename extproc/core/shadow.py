"""A second policy that is asked and not obeyed: how often it would have chosen another node, and what that would have
brought."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.core.types import Candidate, Decision, InferenceRequest, Policy


class Shadow:
    """Counts since the start. Seconds and tokens are predictions, on both sides the same ones."""

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        self.requests = 0
        self.disagreements = 0
        self.regret_seconds = 0.0
        """Time to first token that it would have saved."""
        self.gain_seconds = 0.0
        """Time to first token that it would have cost."""
        self.lost_tokens = 0
        """Cached tokens that it would have used and we did not."""

    def see(
        self, decision: Decision, request: InferenceRequest, candidates: Sequence[Candidate], *, price: float
    ) -> None:
        """One decision of ours, and what it was made on."""
        self.requests += 1
        ours, theirs = decision.node.id, self.policy(request, candidates, price=price).node.id
        if ours == theirs:
            return
        by_id = {each.node.id: each for each in candidates}
        mine, other = by_id[ours], by_id[theirs]
        saved_s = _ttft_s(mine) - _ttft_s(other)
        self.disagreements += 1
        self.regret_seconds += max(saved_s, 0.0)
        self.gain_seconds += max(-saved_s, 0.0)
        self.lost_tokens += max(other.matched_tokens - mine.matched_tokens, 0)


def _ttft_s(each: Candidate) -> float:
    return each.wait_s + each.lora_s + each.prefill_s
