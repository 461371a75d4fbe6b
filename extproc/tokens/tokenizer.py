"""Text to token ids, as the engine's Hugging Face tokenizer gives them, in pieces that encode each by itself."""

from __future__ import annotations

import base64
import binascii
import json
import re
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import tiktoken
import tokenizers
from tokenizers import AddedToken, normalizers

from extproc.tokens import fast
from extproc.tokens.files import (
    Files,
    TokenizerError,
    added_token,
    added_tokens,
    hugging_face,
    of_class,
    parse,
    read,
)

_TIKTOKEN_FAMILIES = {
    "qwen": (fast.QWEN2, True),
    "gpt2": (fast.GPT2, False),
    "r50k_base": (fast.GPT2, False),
    "p50k_base": (fast.GPT2, False),
    "cl100k_base": (fast.CL100K, False),
    "o200k_base": (fast.O200K, False),
}
"""What a rank file does not say, by its name: the pattern, and is text put into NFC."""

_FENCE_CHARACTERS = 64
"""A piece goes on over fences until it is that long: a piece costs its caller about 2 us."""
_STRETCH_CHARACTERS = 4096
"""And no further than to the next seam from there: 0.1-0.3 ms of work."""
_BEHIND_SEAM = re.compile(r"[ \n\u3002\uff0c]")
"""An added token with one of these might lie across a seam."""
_LEAST_NO_ID = 1 << 24
_HOLE = fast.HOLE.to_bytes(4, "little")[1:]
"""In ids below 2**24 these bytes never come in a row."""


class Tokenizer:
    """One model's tokenizer; may be used by several threads at once, none of which holds the GIL for long."""

    __slots__ = (
        "_added",
        "_composes",
        "_core",
        "_fence",
        "_fence_letter",
        "_ids",
        "_library",
        "_seam",
        "doubt",
        "end",
        "start",
        "why_slow",
    )

    def __init__(self, library: tokenizers.Tokenizer | None, *, start: bytes, end: bytes) -> None:
        self._library = library
        self.start = start
        """The ids that the engine puts before those of a text, when it adds special tokens."""
        self.end = end
        """And those behind."""
        self.why_slow = "no reason was looked for"
        """Why not tiktoken but `tokenizers`, at a fifth of its speed, does the work; empty when tiktoken does."""
        self.doubt = ""
        """Why the engine's ids may be others, depending on its version."""
        self._core: Any = None
        self._composes = False
        self._ids: dict[str, bytes] = {}
        self._added: re.Pattern[str] | None = None
        self._fence: re.Pattern[str] | None = None
        self._fence_letter = ""
        self._seam: re.Pattern[str] | None = None

    @classmethod
    def load(cls, files: Files, *, by_class: bool = False) -> Tokenizer:
        """Takes 2 s and 100 MB for 150,000 tokens. TokenizerError: not one that we can do as the engine does.

        With `by_class` some parts of tokenizer.json give way to what transformers 5 puts in their place for the class
        that tokenizer_config.json names (`of_class`); else, as in transformers 4, they stand, and `doubt` says so.
        """
        if files.tokenizer is None:
            return _from_ranks(files)
        data = read(files.tokenizer)
        parsed = parse(data, files.tokenizer)
        library = hugging_face(data, files)  # from here on `parsed` is known to be well-formed
        instead = of_class(parsed, files.config)
        if instead is not None and by_class:
            parsed = instead
            library = hugging_face(json.dumps(parsed).encode(), files)
        if parsed["model"].get("dropout"):
            raise TokenizerError(f"{files.tokenizer}: its model drops merges at random, so ids never repeat")
        added = list(library.get_added_tokens_decoder().values())
        start, end = _around(library)
        made = cls(library, start=start, end=end)
        if instead is not None and not by_class:
            made.doubt = f"transformers 5 may cut words in {files.config['tokenizer_class']}'s own way"
        made._cut(parsed, added, splits=bool(library.encode_special_tokens))
        made._quicken(parsed, added, splits=bool(library.encode_special_tokens))
        return made

    # ---- ids ----

    @property
    def fast(self) -> bool:
        """Does tiktoken do the work?"""
        return not self.why_slow

    def encode(self, piece: str) -> bytes:
        """The ids of a text, 4 bytes each, little-endian; added tokens in it count as such, none is put around it.

        A lone surrogate counts as U+FFFD. 16 KB: 0.6-1.1 ms by tiktoken.
        """
        if self._core is None:
            return self._encode_slowly(piece)
        try:
            if not self._composes or piece.isascii() or _is_composed(piece):
                return self._encode_quickly(piece, self._added.findall(piece) if self._added else ())
            return b"".join(self._encode_composing(piece))
        except UnicodeEncodeError:
            return self.encode(_mend(piece))
        except ValueError:  # a hole; or its regex engine gave up, on some 100,000 blanks in a row
            return self._encode_slowly(piece)

    def _encode_quickly(self, text: str, added: Iterable[str]) -> bytes:
        ids = bytes(self._core.encode_to_tiktoken_buffer(text, set(added)))
        if _HOLE in ids:
            raise ValueError("a byte that is no token")
        return ids

    def _encode_composing(self, piece: str) -> Iterator[bytes]:
        """As the library: added tokens are looked for in the text as it is, and what lies between is composed alone."""
        at = 0
        for match in self._added.finditer(piece) if self._added else ():
            yield self._encode_quickly(_NFC.normalize_str(piece[at : match.start()]), ())
            yield self._ids[match.group()]
            at = match.end()
        yield self._encode_quickly(_NFC.normalize_str(piece[at:]), ())

    def _encode_slowly(self, piece: str) -> bytes:
        if self._library is None:
            raise TokenizerError("a text that tiktoken cannot encode")
        try:
            # `encode` keeps the interpreter to itself until it is done, and counts offsets
            (encoding,) = self._library.encode_batch_fast([piece], add_special_tokens=False)
        except TypeError:  # surrogates
            (encoding,) = self._library.encode_batch_fast([_mend(piece)], add_special_tokens=False)
        return array("I", encoding.ids).tobytes()

    # ---- pieces ----

    def pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces whose encodings, one after the other, are the encoding of the whole.

        Where a piece ends is decided by what is before and one character behind, so all but the last piece stay the
        same when text is added. 400 KB with 400 fences: 0.4 ms. Where nothing is known to part texts, one piece.
        """
        at = 0
        for match in self._fence.finditer(text) if self._fence else ():
            end = match.end()
            if end - at < _FENCE_CHARACTERS:
                continue
            if end - at > _STRETCH_CHARACTERS:
                for seam in self._seams(text, at, end):
                    yield text[at:seam]
                    at = seam
                if end - at < _FENCE_CHARACTERS:
                    continue
            yield text[at:end]
            at = end
        for seam in self._seams(text, at, len(text)):
            yield text[at:seam]
            at = seam
        if at < len(text):
            yield text[at:]

    def _seams(self, text: str, at: int, end: int) -> Iterator[int]:
        """Where to cut a stretch without fences."""
        while self._seam and end - at > _STRETCH_CHARACTERS:
            match = self._seam.search(text, at + _STRETCH_CHARACTERS - 1, end)
            if match is None:
                return
            at = match.end()
            yield at

    def last_fence(self, text: str) -> int:
        """The place just behind the last fence: what is before it and what is behind encode each by itself. 0: none."""
        at = len(text)
        while self._fence and (at := text.rfind(self._fence_letter, 0, at)) >= 0:
            if match := self._fence.match(text, at):
                return match.end()
        return 0

    # ---- loading ----

    def _cut(self, parsed: dict[str, Any], added: list[AddedToken], *, splits: bool) -> None:
        """Find where texts may be cut.

        A fence is an added token of which every occurrence in a text counts, whatever surrounds it (`_independent`).
        The library takes added tokens out first; normalizer, pre-tokenizer and model then see each text between them
        alone. Not so: tokens that count as whole words only, which look at the character before, and Metaspace's
        prepend_scheme "first", which knows the start of the whole.
        """
        plain = all(not (token.lstrip or token.rstrip or token.single_word) for token in added)
        contents = [token.content for token in added]
        normalizer = parsed.get("normalizer")
        if (
            not splits
            and not any(token.single_word for token in added)
            and not _knows_start(parsed.get("pre_tokenizer"))
        ):
            # those found in the text as it is go first, those found in normalized text (here the same) after them
            first = [token for token in added if not token.normalized] or (added if normalizer is None else [])
            free = _independent(contents)
            self._fences(
                token.content
                for token in first
                if token.content in free
                and not (token.lstrip or token.rstrip)
                and token.content == token.content.strip()
            )
        if (
            fast.word_pattern(parsed.get("pre_tokenizer"))
            and fast.composes(normalizer) is not None
            and plain
            and not any(map(_BEHIND_SEAM.search, contents))
        ):
            self._seam = re.compile(fast.SEAM)
        # The proof is above; this is against a mistake in it.
        text = "".join(f"{sample}{mark}" for sample in fast.samples(contents) for mark in ("", *contents[:2]))
        if b"".join(map(self.encode, self.pieces(text))) != self.encode(text):
            self._fence = self._seam = None

    def _fences(self, tokens: Iterable[str]) -> None:
        """Of the tokens only those that begin with the commonest letter: a search for one letter costs a tenth."""
        by_letter = [[*group] for _, group in groupby(sorted(tokens), key=lambda token: token[0])]
        if by_letter:
            fences = max(by_letter, key=len)
            self._fence, self._fence_letter = re.compile(_any_of(fences)), fences[0][0]

    def _quicken(self, parsed: dict[str, Any], added: list[AddedToken], *, splits: bool) -> None:
        """Let tiktoken do the work, if it is proven that it gives the same ids."""
        contents = [token.content for token in added]
        pattern = fast.word_pattern(parsed.get("pre_tokenizer"))
        composes = fast.composes(parsed.get("normalizer"))
        ranks: dict[bytes, int] | str
        if parsed["model"].get("type") != "BPE" or pattern is None:
            ranks = "it is not a byte-level BPE that cuts words by a pattern known here"
        elif composes is None:
            ranks = "its normalizer does more than NFC"
        elif splits:
            ranks = "it splits special tokens"
        elif any(
            token.lstrip or token.rstrip or token.single_word or (token.normalized and composes) for token in added
        ) or len(_independent(contents)) < len(contents):
            ranks = "its added tokens depend on what is around them"
        else:
            ranks = fast.proven_ranks(parsed["model"], set(contents))
        if isinstance(ranks, str) or pattern is None or self._library is None:
            self.why_slow = str(ranks)
            return
        ids = {content: self._library.token_to_id(content) for content in contents}
        self._use(ranks, pattern, {content: at for content, at in ids.items() if at is not None}, bool(composes))
        for sample in fast.samples(contents):
            if self.encode(sample) != self._encode_slowly(sample):
                self._core, self.why_slow = None, f"tiktoken gives other ids for {sample!r}"
                return

    def _use(self, ranks: dict[bytes, int], pattern: str, ids: Mapping[str, int], composes: bool) -> None:
        encoding = tiktoken.Encoding("served", pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(ids))
        self._core = encoding._core_bpe
        self._composes = composes
        self._ids = {content: _bytes(at) for content, at in ids.items()}
        self._added = re.compile(_any_of(ids)) if ids else None
        self.why_slow = ""


# ---- what is put around ----


def _around(library: tokenizers.Tokenizer) -> tuple[bytes, bytes]:
    """The ids that it puts before and behind a text when it adds special tokens.

    The post-processor of tokenizer.json alone decides; beside that file add_bos_token and add_eos_token do nothing.
    """
    found = set()
    for text in ("", "a", "a b\n"):
        bare, full = library.encode(text, add_special_tokens=False).ids, library.encode(text).ids
        places = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
        found.add(frozenset((tuple(full[:at]), tuple(full[at + len(bare) :])) for at in places))
    around = frozenset.intersection(*found)
    if len(around) != 1:
        raise TokenizerError("it does not put the same special tokens around every text")
    ((before, behind),) = around
    return array("I", before).tobytes(), array("I", behind).tobytes()


# ---- tiktoken's rank files ----


def _from_ranks(files: Files) -> Tokenizer:
    """A tokenizer of a rank file and the added tokens of tokenizer_config.json; there is no library to compare with."""
    assert files.tiktoken is not None
    family = _TIKTOKEN_FAMILIES.get(files.tiktoken.stem)
    if family is None:
        known = ", ".join(sorted(_TIKTOKEN_FAMILIES))
        raise TokenizerError(f"{files.tiktoken}: its name does not say how it cuts words; known are: {known}")
    added = added_tokens(files.config)
    if not added:
        raise TokenizerError(f"{files.tiktoken}: no tokenizer_config.json beside it names added_tokens_decoder")
    try:
        pairs = (line.split() for line in read(files.tiktoken).splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"{files.tiktoken} is not a rank file: {error}") from error
    ids = {token.content: at for at, token in added.items()}
    numbers = {*ranks.values(), *ids.values()}
    if len(numbers) < len(ranks) + len(ids) or not 0 <= min(numbers) <= max(numbers) < _LEAST_NO_ID:
        raise TokenizerError(f"{files.tiktoken}: two tokens share an id, or an id is out of range")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"{files.tiktoken} lacks single bytes")
    if len(_independent(ids)) < len(ids):
        raise TokenizerError(f"{files.tiktoken}: its added tokens overlap")
    around = []
    for name in ("bos", "eos"):
        token = added_token(files.config.get(f"{name}_token")) if files.config.get(f"add_{name}_token") else None
        if token and token.content not in ids:
            raise TokenizerError(f"{name}_token {token.content!r} is not among the added tokens")
        around.append(_bytes(ids[token.content]) if token else b"")
    made = Tokenizer(None, start=around[0], end=around[1])
    pattern, composes = family
    made._use(ranks, pattern, ids, composes)
    made._fences(content for content in ids if content == content.strip())
    if not any(map(_BEHIND_SEAM.search, ids)):
        made._seam = re.compile(fast.SEAM)
    return made


# ---- strings ----

_NFC = normalizers.NFC()
_UNSURE = re.compile(
    "[\U00010000-\U0001efff"
    + "".join(chr(point) for point in range(0x80, 0xD800) if unicodedata.category(chr(point)) == "Cn")
    + "]"
)
"""What may be newer than Python's Unicode tables, and older than the library's."""


def _is_composed(text: str) -> bool:
    """Does the library's NFC surely leave it alone? Characters that Python knows never change."""
    return unicodedata.is_normalized("NFC", text) and not _UNSURE.search(text)


def _mend(text: str) -> str:
    """`text` without surrogates: pairs joined, lone ones as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _bytes(token: int) -> bytes:
    return token.to_bytes(4, "little")


def _independent(tokens: Collection[str]) -> set[str]:
    """Those of which every occurrence in a text is found, whatever surrounds it.

    The library goes from left to right and takes the longest token at each place. Only a token that holds another, or
    ends as another begins, can take a part of it away. What begins inside a found token comes too late.
    """
    joined = "\0".join(tokens)
    tails = {token[at:] for token in tokens for at in range(1, len(token))}
    return {
        token
        for token in tokens
        if joined.count(token) == 1 and not any(token[:at] in tails for at in range(1, len(token)))
    }


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern for any of them, as a tree: a place where none begins costs a step or two, not one for each token."""
    tokens = sorted(set(tokens))
    first, last = tokens[0], tokens[-1]
    shared = first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
    tails = [token[len(shared) :] for token in tokens if token != shared]
    if not tails:
        return re.escape(shared)
    branches = "|".join(_any_of(group) for _, group in groupby(tails, key=lambda tail: tail[0]))
    return f"{re.escape(shared)}(?:{branches}){'?' if len(tails) < len(tokens) else ''}"


def _knows_start(pre_tokenizer: Any) -> bool:
    """Does it treat the start of a whole text unlike the start of a text behind an added token?"""
    if isinstance(pre_tokenizer, dict):
        return pre_tokenizer.get("prepend_scheme") == "first" or any(map(_knows_start, pre_tokenizer.values()))
    return isinstance(pre_tokenizer, list) and any(map(_knows_start, pre_tokenizer))
