"""What the simulated model reads and says when it has a tokenizer: the prompts of requests as token ids, and words."""

from __future__ import annotations

import itertools
import time
from datetime import datetime

import msgspec

from extproc.config import ModelConfig
from extproc.core.prompt import Chat, Ids
from extproc.lab.engine import LETTERS, TOKEN_BYTES, Voice
from extproc.models import load_encoder
from extproc.tokens.memo import Memo
from extproc.wire.requests import api_of, parse, read

_WORDS = 256


class Prompts:
    """The tokenizer and the chat template of a directory. ValueError or OSError: not one that a node can speak with."""

    def __init__(self, directory: str) -> None:
        model = msgspec.convert(
            {"name": "model", "tokenizer": directory, "nodes": [{"name": "node", "address": "127.0.0.1:1"}]},
            ModelConfig,
        )
        encoder = load_encoder(model, Memo(0), clock=time.monotonic, now=datetime.now)
        self._tokenizer, self._growth = encoder.tokenizer, encoder.growth
        self.voice = self._voice()

    def read(self, path: str, raw: bytes) -> bytes:
        """The token ids of a request's prompt, 4 bytes each. ValueError: the engine would refuse it."""
        api = api_of(path)
        if api is None or api.exact is None:
            raise ValueError(f"{path} is not read by token ids")
        prompt = read(api.exact, parse(raw, cut=False)).prompt
        if isinstance(prompt, Ids):
            return prompt.data
        if prompt is None:
            raise ValueError("no prompt")
        if not isinstance(prompt, Chat):
            text = prompt.text
        elif self._growth is None:
            raise ValueError("the model has no chat template")
        else:
            text = self._growth.whole(prompt)
        tokens = b"".join(map(self._tokenizer.encode, self._tokenizer.pieces(text)))
        if prompt.add_special_tokens:
            tokens = self._tokenizer.start + tokens + self._tokenizer.end
        if not tokens:
            raise ValueError("the prompt has no tokens")
        return tokens

    def _voice(self) -> Voice:
        """Words of three letters that are one token each: side by side they are the same tokens again in the next
        turn's prompt. The first has no space before it, which many templates would strip."""
        text: dict[bytes, str] = {}

        def words(space: str) -> list[bytes]:
            found = []
            for letters in itertools.product(LETTERS, repeat=3):
                word = space + "".join(letters)
                token = self._tokenizer.encode(word)
                if len(token) == TOKEN_BYTES and token not in text:
                    text[token] = word
                    found.append(token)
                    if len(found) == _WORDS:
                        break
            return found

        first, later = words(""), words(" ")
        if not first or not later:
            raise ValueError("the tokenizer has no words of three letters that are one token")
        return Voice(first, later, text)
