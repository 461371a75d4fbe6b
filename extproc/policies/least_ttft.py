"""The default policy: the least predicted time to first token, with own work priced by the fleet's utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.core.cost import UTILISATION_CEILING
from extproc.core.types import Candidate, Decision, InferenceRequest, Reason


@dataclass(frozen=True, slots=True)
class LeastTtft:
    """cost = (wait_s + lora_s + price * prefill_s) * (1 + crowding * in_flight), among the nodes inside the envelope.

    `price` is the fleet's, or what the node's own KV cache in use makes of it (`cost.price`, with `price_weight`) where
    that is more; what will be repaid of the prefill is not priced. What is in flight at a node, for each unit of its
    weight, stands for what the work does to it: answers that run slower, turns that come back to their prefix and find
    it busy. Long prompts so gather where few are served.

    The envelope leaves out a node whose predicted wait exceeds `load_bound` times the fleet's mean by more than
    `load_slack_s` and `saved_slack` times what the prompt's prefill takes at most; one that is saturated; and one that
    is suspect, while another is inside. Costs within `margin_s` plus `margin_ratio` of the least count as equal: then
    the node with more headroom wins (shorter wait, fewer requests in flight, less recent work, lower KV usage), and the
    fresher sample last; but the session's node before all that, unless less of the prompt is matched there or more is
    in flight.
    """

    load_bound: float = 1.25
    load_slack_s: float = 1.0
    margin_s: float = 0.005
    margin_ratio: float = 0.02
    fallbacks: int = 2
    saved_slack: float = 2.0
    crowding: float = 0.1
    price_weight: float = 2.0

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision:
        wait_s, most_s, best_matched = 0.0, 0.0, 0
        for each in candidates:
            wait_s += each.wait_s
            most_s = max(most_s, each.prefill_s)
            best_matched = max(best_matched, each.matched_tokens)
        limit_s = self.load_bound * wait_s / len(candidates) + self.load_slack_s + self.saved_slack * most_s
        inside = [each for each in candidates if each.wait_s <= limit_s and not each.saturated and not each.suspect]
        if not inside:
            alive = [each for each in candidates if not each.suspect] or list(candidates)
            alive = [each for each in alive if not each.saturated] or alive
            inside = [each for each in alive if each.wait_s <= limit_s] or alive
        costs = [self._cost(each, price) for each in inside]
        least = min(costs)
        bound = least + self.margin_s + self.margin_ratio * least
        close = [i for i, cost in enumerate(costs) if cost <= bound]
        best = close[0] if len(close) == 1 else min(close, key=lambda i: _headroom(inside[i]))
        if request.session is not None and not inside[best].session:
            best = _of_session(inside, close, best)
        chosen = inside[best]
        if chosen.session_tokens:
            reason = Reason.SESSION
        elif not request.matchable:
            reason = Reason.FALLBACK
        elif not best_matched:
            reason = Reason.COLD
        else:
            reason = Reason.LOCALITY if chosen.matched_tokens == best_matched else Reason.HEADROOM
        ranked = (chosen, *self._next_best(inside, costs, chosen, candidates)) if self.fallbacks else (chosen,)
        return Decision(ranked, reason, best_matched, price, tuple([self._cost(each, price) for each in ranked]))

    def _cost(self, each: Candidate, price: float) -> float:
        usage = each.kv_usage
        if usage > 0.0:
            usage = min(usage, UTILISATION_CEILING)
            price = max(price, 1.0 + self.price_weight * usage / (1.0 - usage))
        crowd = 1.0 + self.crowding * each.in_flight / each.node.weight
        return (each.wait_s + each.lora_s + price * (each.prefill_s - each.repaid_s) + each.repaid_s) * crowd

    def _next_best(
        self, inside: list[Candidate], costs: list[float], chosen: Candidate, candidates: Sequence[Candidate]
    ) -> list[Candidate]:
        cheapest = sorted(range(len(inside)), key=costs.__getitem__)[: self.fallbacks + 1]
        found = [inside[i] for i in cheapest if inside[i] is not chosen]
        if len(found) < self.fallbacks:
            outside = [each for each in candidates if each is not chosen and each not in found]
            found += sorted(outside, key=lambda each: (each.suspect, each.wait_s))
        return found[: self.fallbacks]


def _headroom(candidate: Candidate) -> tuple[float, float, float, float, float]:
    """Less is more of it."""
    return (
        candidate.wait_s,
        candidate.in_flight,
        candidate.recent_work_s,
        candidate.kv_usage,
        candidate.sample_age_s,
    )


def _of_session(inside: Sequence[Candidate], close: Sequence[int], best: int) -> int:
    """Which of `close` the session's node is, where it is as good as `best`; else `best`."""
    # Whatever draws requests together has to be bounded: here by what is in flight, and a node that had more than its
    # share of recent work is no session's node (see Pool.candidates).
    for i in close:
        each = inside[i]
        if each.session:
            equal = each.matched_tokens == inside[best].matched_tokens
            return i if equal and each.in_flight <= inside[best].in_flight else best
    return best
