"""Policies to hold the default one against: how it is tightened, down to latency alone, and locality alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from extproc.core.types import Candidate, Decision, InferenceRequest, Policy, Reason
from extproc.policies.least_ttft import LeastTtft

_STEPS = 4


class Tightened:
    """LeastTtft, of whose locality `1 - tightness` is left: of what the envelope grants beyond the mean wait, of the
    price beyond 1, and of what a node saves of the prefill of which the others save least.

    At 1.0 it is latency alone: the least predicted wait plus a prefill that is the same on all nodes but for their
    weights, as if nothing were cached anywhere, among the nodes whose wait is no longer than the fleet's mean, with the
    crowd there, saturation and suspicion as ever.
    """

    def __init__(self, policy: LeastTtft, tightness: float) -> None:
        self._tightness, self._left = tightness, 1.0 - tightness
        self._policy = replace(
            policy,
            load_bound=1.0 + (policy.load_bound - 1.0) * self._left,
            load_slack_s=policy.load_slack_s * self._left,
            saved_slack=policy.saved_slack * self._left,
            price_weight=policy.price_weight * self._left,
        )

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision:
        whole_s = self._tightness * max(each.prefill_s * each.node.weight for each in candidates)
        found = [
            each._replace(
                prefill_s=self._left * each.prefill_s + whole_s / each.node.weight,
                uncached_tokens=each.uncached_tokens
                + int(self._tightness * (request.prompt_tokens - each.uncached_tokens)),
            )
            for each in candidates
        ]
        if not self._left and request.session is not None:
            request = replace(request, session=None)
        return self._policy(request, found, price=1.0 + (price - 1.0) * self._left)


def tightened(policy: LeastTtft) -> tuple[Policy, ...]:
    """Step by step, down to latency alone."""
    return tuple(Tightened(policy, step / _STEPS) for step in range(1, _STEPS + 1))


def most_matched(request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision:
    """Locality alone: who holds most of the prompt, whatever waits there."""
    alive = [each for each in candidates if not each.suspect] or candidates
    best = max(each.matched_tokens for each in candidates)
    chosen = min(alive, key=lambda each: (-each.matched_tokens, each.wait_s, each.in_flight))
    return Decision((chosen,), Reason.LOCALITY if best else Reason.COLD, best, price)


SHADOWS: Mapping[str, Callable[[LeastTtft], Policy]] = MappingProxyType(
    {"latency": lambda policy: Tightened(policy, 1.0), "locality": lambda _: most_matched}
)
"""By their name in the configuration."""
