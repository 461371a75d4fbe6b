"""Embeddings, pooling, scores, reranking, classes: every prompt is read once, so there is no prefix to match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import Content, NoContent, content_of, size

_TEXTS = ("input", "messages", "query", "queries", "documents", "items", "text_1", "text_2", "prompt", "data")


def pooling(body: Mapping[str, Any]) -> Content:
    """Load only: the size of all text. A query counts once, however many documents it is scored against."""
    texts = [body[key] for key in _TEXTS if body.get(key) is not None]
    if not texts:
        raise NoContent("no input")
    return content_of(body, b"", size(texts))
