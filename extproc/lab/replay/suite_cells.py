"""The cells of the policy suite: which traffic, how much of it, on which fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from extproc.lab.replay.types import Machine


class Part(StrEnum):
    """What a cell may be used for."""

    TUNED = "tuned"
    """Defaults may be chosen by it."""
    KIN = "kin"
    """A tuned cell's trace at another load, or on another fleet: reported."""
    UNSEEN = "unseen"
    """A trace that nothing was tuned on: reported."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the suite."""

    name: str
    trace: str
    """A generator with its options; or, with `data`, options of that file's reader."""
    load: float
    """Share of what the fleet can serve."""
    part: Part
    data: str = ""
    """A public file, which may be compressed, below the data directory."""
    nodes: int = 8
    speeds: tuple[float, ...] = (1.0,)
    """Repeated over the fleet."""
    cache_tokens: int = 1_000_000
    slo_ttft_s: float = 2.0

    def machines(self) -> list[Machine]:
        """The fleet."""
        return [
            Machine(f"node-{i}", cache_tokens=self.cache_tokens, speed=self.speeds[i % len(self.speeds)])
            for i in range(self.nodes)
        ]


MOONCAKE = "mooncake/conversation_trace.jsonl"
WEKA = "weka_claude_code/sessions.rle.jsonl"
AZURE_CODE = "azure_llm/AzureLLMInferenceTrace_code.csv"
AZURE_CONVERSATION = "azure_llm/AzureLLMInferenceTrace_conv.csv"

ORIGINS: Mapping[str, str] = MappingProxyType(
    {
        MOONCAKE: "github.com/kvcache-ai/Mooncake, FAST25-release/traces",
        WEKA: "github.com/callanjfox/kv-cache-tester, traces; a session a line, hash_ids as runs (hash_rle)",
        AZURE_CODE: "github.com/Azure/AzurePublicDataset, data",
        AZURE_CONVERSATION: "github.com/Azure/AzurePublicDataset, data",
    }
)
"""Where each public file is from."""

_MIXED = (1.0, 1.0, 0.5, 1.5)
_TUNED, _KIN, _UNSEEN = Part.TUNED, Part.KIN, Part.UNSEEN

_CHAT = "chat:conversations=5000,per_s=10,think_s=10"
_GROUPS = "groups:calls=20000"
_HOT = "hot:calls=20000"
_AGENTS = "agents:agents=700,per_s=1.2"

CELLS: Sequence[Cell] = (
    Cell("mooncake-8-50", "", 0.50, _KIN, MOONCAKE),
    Cell("mooncake-8-80", "", 0.80, _TUNED, MOONCAKE),
    Cell("mooncake-8-95", "", 0.95, _KIN, MOONCAKE),
    Cell("mooncake-8-110", "", 1.10, _KIN, MOONCAKE),
    Cell("mooncake-4-80-mixed", "", 0.80, _KIN, MOONCAKE, nodes=4, speeds=_MIXED),
    Cell("mooncake-32-80-small", "", 0.80, _KIN, MOONCAKE, nodes=32, cache_tokens=200_000),
    Cell(
        "weka-8-80", "sessions=200,start_s=3600,end_s=4500", 0.80, _UNSEEN, WEKA, cache_tokens=4_000_000, slo_ttft_s=5.0
    ),
    Cell(
        "weka-32-50",
        "start_s=1800,end_s=2400,most_pause_s=60",
        0.50,
        _UNSEEN,
        WEKA,
        nodes=32,
        cache_tokens=2_000_000,
        slo_ttft_s=5.0,
    ),
    Cell("azure-code-4-50", "share=0.7", 0.50, _UNSEEN, AZURE_CODE, nodes=4, cache_tokens=250_000),
    Cell("azure-conv-8-80", "share=0.5", 0.80, _UNSEEN, AZURE_CONVERSATION),
    Cell("chat-8-80", _CHAT, 0.80, _TUNED),
    Cell("chat-8-80-small", _CHAT, 0.80, _KIN, cache_tokens=600_000),
    Cell("groups-8-80", _GROUPS, 0.80, _TUNED),
    Cell("groups-8-110-mixed", _GROUPS, 1.10, _KIN, speeds=_MIXED),
    Cell("hot-8-80", _HOT, 0.80, _TUNED),
    Cell("hot-32-95", _HOT, 0.95, _KIN, nodes=32),
    Cell("agents-8-80", _AGENTS, 0.80, _UNSEEN),
    Cell("agents-8-95-mixed", _AGENTS, 0.95, _UNSEEN, speeds=_MIXED),
    Cell("flash-8-50", "flash:conversations=3500,per_s=7,crowd=4000,crowd_per_s=60", 0.50, _UNSEEN),
    Cell("tenants-8-50", "tenants:conversations=500,per_s=0.5,flood=5000,flood_per_s=15", 0.50, _UNSEEN),
    Cell("mixed-4-80", "mixed:calls=12000", 0.80, _UNSEEN, nodes=4),
)

QUICK: Sequence[Cell] = (
    Cell("mooncake-8-80-quick", "calls_at_most=4000", 0.80, _TUNED, MOONCAKE, cache_tokens=300_000),
    Cell("chat-4-80-quick", "chat:conversations=1200,per_s=6,think_s=5", 0.80, _TUNED, nodes=4, cache_tokens=300_000),
    Cell("groups-4-80-quick", "groups:calls=4000,groups=75", 0.80, _TUNED, nodes=4),
    Cell("hot-4-80-quick", "hot:calls=4000", 0.80, _TUNED, nodes=4, cache_tokens=300_000),
    Cell("agents-4-95-quick", "agents:agents=240,per_s=0.7", 0.95, _UNSEEN, nodes=4, speeds=_MIXED),
    Cell("mixed-4-110-quick", "mixed:calls=3000", 1.10, _UNSEEN, nodes=4),
)
"""Short traces: they show that all is there, and prove nothing."""

REASONS: Mapping[str, str] = MappingProxyType({})
"""By cell: why a baseline wins there."""
