"""Policies by name: ours, the oracle, and the peers' rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from extproc.config import PolicyConfig
from extproc.lab.replay import baselines
from extproc.lab.replay.oracle import Oracle
from extproc.lab.replay.ours import Ours, weights_of
from extproc.lab.replay.types import Balancer, Machine

NAMES = ("ours", "oracle", *baselines.BASELINES)


class _Ours(msgspec.Struct, frozen=True):
    access_log_delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    weights: bool = False
    """Is it told how fast each node is?"""


class _Oracle(msgspec.Struct, frozen=True):
    caches: bool = True
    queues: bool = True
    """Does it know what is cached, and what is queued? What it does not, it believes as ours does."""


def make(spec: str, *, seed: int, machines: Sequence[Machine], block_tokens: int) -> Balancer:
    """The balancer that `spec` names: `ours`, `oracle`, or a baseline.

    Ours and the oracle take what `[policy]` of the configuration has, `ours:price_weight=1.5:margin_s=0.01`, and what
    is listed above. ValueError says what is wrong.
    """
    name, *settings = spec.split(":")
    if name not in NAMES:
        raise ValueError(f"there is no policy {name!r}: take one of {', '.join(NAMES)}")
    given = dict(each.partition("=")[::2] for each in settings)
    if name not in ("ours", "oracle"):
        if given:
            raise ValueError(f"{name} has no settings: {spec!r} should be {name!r}")
        return baselines.make(name, seed=seed, machines=machines, block_tokens=block_tokens)
    try:
        if name == "oracle":
            known = msgspec.convert(_own(given, _Oracle), _Oracle, strict=False)
            policy = msgspec.convert(given, PolicyConfig, strict=False)
            return Oracle(block_tokens, policy=policy, caches=known.caches, queues=known.queues)
        told = msgspec.convert(_own(given, _Ours), _Ours, strict=False)
        policy = msgspec.convert(given, PolicyConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{spec!r}: {error}") from error
    weights = weights_of(machines) if told.weights else None
    return Ours(block_tokens, policy=policy, weights=weights, access_log_delay_s=told.access_log_delay_s)


def _own(given: dict[str, str], kind: type[msgspec.Struct]) -> dict[str, str]:
    """Those of `kind`, which leave `given`."""
    return {key: given.pop(key) for key in kind.__struct_fields__ if key in given}
