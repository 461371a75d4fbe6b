"""What the tests against vLLM found, for the end of the run and for the issue: figures, differences, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    figures: list[str] = field(default_factory=list)
    """One line for each test."""
    differences: list[tuple[str, str, str]] = field(default_factory=list)
    """Kind of request, model, and what differs; one for each request."""
    refusals: list[tuple[str, str]] = field(default_factory=list)
    """Model and the engine's reason; one for each request."""

    def lines(self) -> Iterator[str]:
        yield from self.figures
        if self.differences:
            yield "other ids than the engine's:"
        for kind, count in Counter(kind for kind, _, _ in self.differences).most_common():
            of_kind = [(model, what) for other, model, what in self.differences if other == kind]
            models = ", ".join(dict.fromkeys(model for model, _ in of_kind))
            yield f"  {count:4} {kind} ({models}); the first: {of_kind[0][1]}"
        if self.refusals:
            yield "refused by the engine:"
        for why, count in Counter(why for _, why in self.refusals).most_common():
            models = ", ".join(dict.fromkeys(model for model, other in self.refusals if other == why))
            yield f"  {count:4} {why} ({models})"


REPORT = Report()
"""Of this run."""
