"""Which byte-level BPEs tiktoken encodes exactly as Hugging Face's library does, with the proof."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

# ---- how text is cut into words ----

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(contraction: str, digits: str) -> str:
    """Words that end where lower case turns to upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    rest = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    return f"{lead}[{_UPPER}]*[{_LOWER}]+{contraction}|{lead}[{_UPPER}]+[{_LOWER}]*{contraction}|{digits}|{rest}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""Digits(individual_digits) before ByteLevel: each digit apart, and a text ends before each, for the look-ahead too."""
QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
O200K = _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")

PATTERNS = frozenset({GPT2, GPT2_DIGITS, QWEN2, LLAMA3, QWEN35, CL100K, O200K, TEKKEN})
"""The patterns that are known to match every character of every text, and (see `SEAM`) where they surely cut."""

SEAM = r"[0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff](?=[ \n\u3002\uff0c])"
"""A place where each of PATTERNS cuts whatever lies around it: behind a letter or digit, before a space, a line feed,
an ideographic full stop or a fullwidth comma.

No alternative of any of them goes on from a letter or digit to one of these four, so a match that reaches the seam ends
there. Matches before it are the same without what follows: none has a look-behind, and the only look-ahead is behind
white space, which the letter is not. NFC does not reach over it: none of the four composes with what stands before.
"""


def word_pattern(pre_tokenizer: Any) -> str | None:
    """The one of PATTERNS that a byte-level `pre_tokenizer` of a tokenizer.json cuts words by; None: another."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    own = bool(steps[-1].get("use_regex", True))
    match steps[:-1]:
        case [] if own:
            return GPT2
        case [{"type": "Digits", "individual_digits": True}] if own:
            return GPT2_DIGITS
        case [{"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}] if not own:
            return regex if regex in PATTERNS else None
    return None


def composes(normalizer: Any) -> bool | None:
    """Is text put into NFC first, or (False) left as it is; None: something else is done to it."""
    match _steps(normalizer, "normalizers"):
        case []:
            return False
        case [{"type": "NFC"}]:
            return True
    return None


def _steps(stage: Any, members: str) -> list[dict[str, Any]]:
    """A stage of a tokenizer.json as the sequence that it is."""
    if stage is None:
        return []
    if stage.get("type") == "Sequence":
        return [step for member in stage[members] for step in _steps(member, members)]
    return [stage]


# ---- how words are merged ----

HOLE = 0xFFFFFF00
"""Plus a byte: the id of a byte that is no token. Hugging Face leaves it out, and what is around it may merge."""


def _byte_letters() -> dict[int, int]:
    """The code points that stand for bytes in a byte-level vocabulary: printable Latin-1 itself, the rest from 256 on.

    What Latin-1 has besides stands for nothing, and is led out of it.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {**dict.fromkeys(others, 0xFFFF), **{256 + at: byte for at, byte in enumerate(others)}}


_BYTES = _byte_letters()


def _bytes_of(token: str) -> bytes | None:
    """The bytes that a token of a byte-level vocabulary stands for; None: it stands for none, no text yields it."""
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def proven_ranks(model: dict[str, Any], added: Collection[str]) -> dict[bytes, int] | str:
    """tiktoken's ranks for a BPE `model` of a tokenizer.json; or why they might give other ids.

    Where the vocabulary lacks single bytes, texts with those get ids from HOLE on, and have to be encoded otherwise.

    Both libraries start from single bytes and merge, again and again, the best adjacent pair, the leftmost of equals.
    For Hugging Face a pair is as good as its place in the list of merges, and must be listed. For tiktoken, as the rank
    of the token that it makes, and need not be. The proof that they agree:

    A pair (x, y) that makes the token T can only become adjacent if tiktoken, given T's bytes alone, comes by exactly
    the state [x][y]: what happens between two boundaries that are never crossed does not depend on what is outside.
    There is at most one state of two tokens on the way of T, since every step takes one token away. So T has one pair
    that ever occurs, whatever the text. If that pair is listed for every T, and those pairs are listed in the order of
    the ranks of their tokens, then both libraries see the same candidates in the same order at each step.

    Cost: about 1 s for 150,000 tokens.
    """
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            return f"the model has {option}"
    listed: dict[tuple[bytes | None, bytes | None], int] = {}
    for place, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        listed[_bytes_of(left), _bytes_of(right)] = place  # of a pair listed twice the last counts
    # Text that holds an added token is cut around it, so none of these is ever seen by the model.
    ranks = {
        spelled: rank
        for token, rank in model["vocab"].items()
        if token not in added and (spelled := _bytes_of(token)) is not None
    }
    holes = {bytes([byte]) for byte in range(256)} - ranks.keys()
    if holes:  # a trained vocabulary often lacks those that UTF-8 never has, and some control characters
        ranks = {token: rank for token, rank in ranks.items() if not any(hole in token for hole in holes)}
        ranks.update((hole, HOLE + hole[0]) for hole in holes)
    whole_words = bool(model.get("ignore_merges"))
    last = -1
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) < 2:
            continue
        pair = _last_pair(token, ranks)
        if pair is None:
            # Merging never makes it. tiktoken would still give it for a word of just these bytes, Hugging Face only
            # with ignore_merges.
            if not whole_words:
                del ranks[token]
            continue
        place = listed.get(pair, -1)
        if place < 0:
            return f"tiktoken would merge {pair[0]!r} and {pair[1]!r}, which is not among the merges"
        if place < last:
            return "ids are not in the order of the merges"
        last = place
    return ranks


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that tiktoken has before it makes `token`; None: it gets stuck before."""
    parts = [token[at : at + 1] for at in range(len(token))]
    rank_of = ranks.get
    scores = [rank_of(left + right, HOLE) for left, right in pairwise(parts)]
    while len(parts) > 2:
        best = min(scores)
        if best >= HOLE:
            return None
        at = scores.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del scores[at]
        if at:
            scores[at - 1] = rank_of(parts[at - 1] + parts[at], HOLE)
        if at < len(scores):
            scores[at] = rank_of(parts[at] + parts[at + 1], HOLE)
    return parts[0], parts[1]


# ---- texts to compare two tokenizers on ----

_SCRIPTS = (
    "0020-007e 0020-007e 00a0-024f 0300-036f 0370-03ff 0400-04ff 0530-058f 0590-05ff 0600-06ff 0900-097f 0980-09ff"
    " 0b80-0bff 0e00-0e7f 0f00-0fff 1000-109f 10a0-10ff 1100-11ff 1200-137f 13a0-13ff 1780-17ff 1e00-1eff 1f00-1fff"
    " 2000-206f 2070-20cf 2100-218f 2190-23ff 2460-24ff 2600-27bf 3000-30ff 3400-34ff 4e00-9fff ac00-d7a3 fb00-fb4f"
    " fe00-fe6f ff00-ffef 10400-1044f 12000-123ff 1d400-1d7ff 1f1e6-1f1ff 1f300-1f64f 1f900-1f9ff 20000-200ff"
    " e0100-e01ef 0000-00a0 0378-0560 1c80-1cbf 2c00-2dff a640-abff 10d40-10d8f 11380-113ff 16100-1613f 1e5d0-1e5ff"
)
"""Code points, the least and the last; the latter ones are of young scripts, control characters and gaps."""
_SAYINGS = (
    "I'll say it's they've we'd I'M YOU'RE 'sound 'tis o'clock don''t 'll",
    "x\u02bcs \u017f'\u017f '\u017f 'S \u212a \u2126 \u00df'ss \ufb06 \u0130\u0131",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # ok\r\n\n    if x != 0xFF: pass\n",
    "a  b   c    \n\n \n  \t\t x\u00a0\u3000y\u2028z\u0085 \u200b\ufeff",
    "1 22 333 4444 55555 3.14159 1,000,000 \u0663\u0664 \u00bd\u00b2 \u2460 \u096f  7 \n8",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "e\u0301 n\u0303 \u1100\u1161\u11a8 q\u0307\u0323 \u0958 \u0f73 \u2adc",
    '<div class="a">&amp;</div> {"k": [1, -2.5e-7, null]} https://example.org/a?b=c#d',
    "\x00\x01\x7f\x1b[0m\r\r\n\x0b\x0c\x1c\x1f",
    "",
    " ",
    "\n",
    " " * 200 + "x" + "\t" * 70 + "\n" * 70 + "=" * 90,
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\u3001\u4e16\u754c\uff01",
    "\uc548\ub155 \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
)
_BETWEEN = (" ", " ", "  ", "\n", "'s", "7", "a", "\u0301", ".")


def samples(markers: Collection[str]) -> Iterator[str]:
    """Some hundreds of texts of many scripts, always the same, some with `markers` in them."""
    yield from _SAYINGS
    rng = random.Random(0)
    marks = sorted(markers)[:64]
    for span in _SCRIPTS.split():
        first, last = (int(point, 16) for point in span.split("-"))
        for _ in range(8):
            letters = [chr(rng.randint(first, last)) for _ in range(rng.randint(1, 40))]
            for _ in range(rng.randint(0, 12)):
                letters.insert(rng.randint(0, len(letters)), rng.choice(_BETWEEN))
            if marks and rng.random() < 0.5:
                letters.insert(rng.randint(0, len(letters)), rng.choice(marks))
            yield "".join(letters)
