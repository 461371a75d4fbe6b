"""What a request asks a model to read, before it is token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""An OpenAI chat message: role, content (text, or a list of parts), tool_calls, tool_call_id, name, reasoning."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that a chat template renders."""

    messages: Sequence[Any]
    """As the client sent them, in the form of its API."""
    expand: Callable[[Sequence[Any]], list[Message]]
    """Some of `messages`, in order, as chat messages; ValueError when the engine would refuse them."""
    identity: Callable[[Any], list[bytes]]
    """One of `messages` as bytes that differ whenever its rendering may."""
    tools: list[Any] | None = None
    """As the template gets them."""
    options: Mapping[str, Any] | None = None
    """What else the template sees."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    validated: bool = True
    """The engine puts the keys of tools and tool calls in an order of its own."""
    media: bool = False
    """It has parts that are not text; they stand in the messages as text made of their hash, so that the blocks before
    them are the engine's, and those from there on are only ours."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt that is tokenized as it is."""

    text: str
    add_special_tokens: bool = True
    media: bool = False
    """There is more than text, and it keeps the prompt apart."""


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids, 4 bytes each, little-endian."""

    data: bytes
    media: bool = False
    """Some are made of the hash of what is not text."""


Prompt: TypeAlias = Chat | Text | Ids
