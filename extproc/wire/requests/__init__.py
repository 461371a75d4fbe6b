"""Request APIs, one file each: from a path and a body to its prompt, canonical or exactly as engines read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jiter

from extproc.wire.requests import anthropic, generate, llamacpp, ollama, openai, pooling, responses, vllm
from extproc.wire.requests.content import Content, NoContent

Reader = Callable[[Mapping[str, Any]], Content]


class Api(NamedTuple):
    """How the bodies of one API are read."""

    canonical: Reader
    """For engines whose tokens are not known: `Content.data`."""
    exact: Reader | None
    """For engines whose tokenizer is known: `Content.prompt`. None: the engine renders in a way that we do not know."""


APIS: dict[str, Api] = {
    "/chat/completions": Api(openai.chat_completions, openai.exact_chat_completions),
    "/completions": Api(openai.completions, openai.exact_completions),
    "/responses": Api(responses.responses, responses.exact_responses),
    "/v1/messages": Api(anthropic.messages, anthropic.exact_messages),
    "/v1/messages/count_tokens": Api(anthropic.count_tokens, anthropic.count_tokens),
    "/embeddings": Api(pooling.pooling, pooling.pooling),
    "/pooling": Api(pooling.pooling, pooling.pooling),
    "/score": Api(pooling.pooling, pooling.pooling),
    "/rerank": Api(pooling.pooling, pooling.pooling),
    "/classify": Api(pooling.pooling, pooling.pooling),
    "/inference/v1/generate": Api(vllm.generate, vllm.exact_generate),
    "/tokenize": Api(vllm.tokenize, vllm.tokenize),
    "/api/chat": Api(ollama.chat, None),
    "/api/generate": Api(ollama.generate, None),
    "/generate": Api(generate.generate, generate.exact_generate),
    "/completion": Api(llamacpp.completion, llamacpp.exact_completion),
}
"""By the end of the path, so that prefixes do not matter; of two that fit, the longer comes first."""

_BOM = b"\xef\xbb\xbf"


def api_of(path: str) -> Api | None:
    """The API at a path; query string, trailing slashes and prefixes do not matter. None: no API of ours."""
    plain = path.partition("?")[0].rstrip("/")
    for suffix, api in APIS.items():
        if plain.endswith(suffix):
            return api
    return None


def parse(head: bytes, *, cut: bool) -> Mapping[str, Any]:
    """A body, or as much of it as its head has. NoContent: it is no JSON object.

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
    return body


def read(reader: Reader, body: Mapping[str, Any]) -> Content:
    """What `reader` finds in a parsed body. NoContent says why there is none, NotExact why it is not exact."""
    try:
        return reader(body)
    except RecursionError as error:
        raise NoContent("nested too deep") from error
