"""Request APIs, one file each: from a path and a body to its content in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jiter

from extproc.wire.requests import anthropic, generate, llamacpp, ollama, openai, pooling, responses, vllm
from extproc.wire.requests.content import Content, NoContent

Reader = Callable[[Mapping[str, Any]], Content]

READERS: dict[str, Reader] = {
    "/chat/completions": openai.chat_completions,
    "/completions": openai.completions,
    "/responses": responses.responses,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/embeddings": pooling.pooling,
    "/pooling": pooling.pooling,
    "/score": pooling.pooling,
    "/rerank": pooling.pooling,
    "/classify": pooling.pooling,
    "/inference/v1/generate": vllm.generate,
    "/tokenize": vllm.tokenize,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/generate": generate.generate,
    "/completion": llamacpp.completion,
}
"""By the end of the path, so that prefixes do not matter; of two that fit, the longer comes first."""

_BOM = b"\xef\xbb\xbf"


def reader_of(path: str) -> Reader | None:
    """The reader for a path; query string, trailing slashes and prefixes do not matter. None: no API of ours."""
    plain = path.partition("?")[0].rstrip("/")
    for suffix, reader in READERS.items():
        if plain.endswith(suffix):
            return reader
    return None


def read(reader: Reader, head: bytes, *, cut: bool) -> Content:
    """The content of a body, or of the head of one. NoContent says why there is none.

    JSON is UTF-8 here; a byte order mark is passed over, UTF-16 and UTF-32 are not read.
    """
    if head.startswith(_BOM):
        head = head[len(_BOM) :]
    try:
        # no cache: it would keep short strings of a prompt alive after the request
        body = jiter.from_json(head, cache_mode="none", partial_mode="trailing-strings" if cut else False)
        if cut and isinstance(body, dict) and next(reversed(body), None) == "model":
            # a name cut in the middle may be another's name: without unfinished strings it is whole or not there
            body = jiter.from_json(head, cache_mode="none", partial_mode="on")
    except ValueError as error:
        raise NoContent("invalid JSON") from error
    if not isinstance(body, dict):
        raise NoContent("the body is not an object")
    try:
        return reader(body)
    except RecursionError as error:
        raise NoContent("nested too deep") from error
