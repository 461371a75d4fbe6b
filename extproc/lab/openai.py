"""The OpenAI requests and answers of the simulated node: bodies, its chat template, JSON shapes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from aiohttp import web

from extproc.lab.engine import TOKEN_BYTES, Job

Count = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None

    def text(self) -> bytes:
        """The message as the template renders it: a fence, then the text; parts that are no text go in as JSON."""
        parts = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content or []
        words = [part["text"] if isinstance(part.get("text"), str) else json.dumps(part) for part in parts]
        if self.tool_calls:
            words.append(json.dumps(self.tool_calls))
        return whole_tokens(f"<|{self.role}|>") + whole_tokens("".join(words))


@dataclass(frozen=True, slots=True)
class ChatBody:
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    model: str | None = None
    tools: list[Any] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    @property
    def answer_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS

    def prompt_text(self) -> bytes:
        tools = whole_tokens("<|tools|>" + json.dumps(self.tools)) if self.tools else b""
        return tools + b"".join(message.text() for message in self.messages) + whole_tokens("<|assistant|>")


@dataclass(frozen=True, slots=True)
class CompletionBody:
    prompt: str | Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    model: str | None = None
    max_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    @property
    def answer_tokens(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS

    def prompt_text(self) -> bytes:
        if isinstance(self.prompt, str):
            return whole_tokens(self.prompt or " ")
        return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in self.prompt)


def whole_tokens(text: str) -> bytes:
    """The text filled up to whole tokens, so that what follows it tokenizes alike whatever comes before."""
    data = text.encode()
    return data + b" " * (-len(data) % TOKEN_BYTES)


def error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer in OpenAI's error shape, as vLLM fills it in."""
    fault = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": fault}, status=status, headers=headers)


@dataclass(frozen=True, slots=True)
class Answer:
    """The JSON of one answer in the shape of its API."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, job: Job) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return self._envelope("chat.completion", [choice], usage=usage(job))

    def chunk(self, text: str, *, last: bool) -> bytes:
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length" if last else None}
        return self._event([choice])

    def role_chunk(self) -> bytes:
        """What a chat stream starts with, sent together with the first token."""
        if not self.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def usage_chunk(self, job: Job) -> bytes:
        return self._event([], usage=usage(job))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode(self._envelope("chat.completion.chunk", choices, **more)) + b"\n\n"

    def _envelope(self, chat_object: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        prefix, kind = ("chatcmpl-", chat_object) if self.chat else ("cmpl-", "text_completion")
        head = {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def usage(job: Job) -> dict[str, Any]:
    """The token counts of a finished job, cached ones included."""
    completion_tokens = len(job.answer) // TOKEN_BYTES
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }
