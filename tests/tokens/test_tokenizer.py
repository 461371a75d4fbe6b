"""Our ids are the Hugging Face library's, and pieces encode as the whole does."""

from __future__ import annotations

import base64
import json
import random
import re
import threading
import unicodedata
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tokenizers
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.tokens import fast
from extproc.tokens.files import TokenizerError, find
from extproc.tokens.tokenizer import Tokenizer
from tests.tokens import vocabularies
from tests.tokens.vocabularies import FAST, KINDS, MARKERS

DATA = Path(__file__).parents[3] / "shared" / "data"
BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c"]
SCRIPTS = st.sampled_from(
    [*map(chr, range(128)), *"éßſK\u0301\u0338\u0300ÅΩא\u05b0ع\u064bนमि\u094d字。，かガ\u3099한각🙂👩\u200d👧🏽🇩"]
)
TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [*MARKERS, *BLANKS, *(marker[:-1] for marker in MARKERS), "'s", "'LL", "don't", "123456", "x = "]
        ),
        st.text(max_size=12),
        st.text(SCRIPTS, max_size=30),
        st.text("ab cd \n", min_size=20, max_size=200),
    ),
    max_size=12,
).map("".join)


@cache
def directory(kind: str) -> Path:
    return vocabularies.make(kind, Path(mkdtemp(prefix="kvaffinity-")))


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.load(find(str(directory(kind)), revision=None))


@cache
def library(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory(kind) / "tokenizer.json"))


def of_library(kind: str, text: str) -> bytes:
    return array("I", library(kind).encode(text, add_special_tokens=False).ids).tobytes()


def ids(encoded: bytes) -> list[int]:
    return array("I", encoded).tolist()


def loaded(path: Path, change: Callable[[dict[str, Any]], object], kind: str = "gpt2", **config: Any) -> Tokenizer:
    made = vocabularies.tokenizer_json(kind)
    change(made)
    return Tokenizer.load(find(str(vocabularies.write(path, made, **config)), revision=None))


def unchanged(_: dict[str, Any]) -> None:
    """The tokenizer as it is."""


# ---- ids ----


@pytest.mark.parametrize("kind", KINDS)
def test_tiktoken_does_the_work_where_it_is_proven(kind: str) -> None:
    made = tokenizer(kind)
    assert made.fast == (kind in FAST) == (made.why_slow == "")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=500, deadline=None)
@given(text=TEXT)
def test_ids_are_the_librarys(kind: str, text: str) -> None:
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer(kind).encode(text) == of_library(kind, mended)


@pytest.mark.parametrize("kind", ["digits", "qwen2", "o200k"])
def test_ids_are_the_librarys_for_every_character(kind: str) -> None:
    """In the surroundings that decide about words: each code point of the first three planes, and some after them."""
    made = tokenizer(kind)
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 997)]
    for at in range(0, len(points), 512):
        text = "".join(f"a{c}b {c}1{c}{c} {c}\n{c}'{c}" for c in map(chr, points[at : at + 512]))
        assert made.encode(text) == of_library(kind, text), hex(points[at])


@pytest.mark.parametrize("kind", FAST)
def test_ids_are_the_librarys_for_thousands_of_texts(kind: str) -> None:
    made, rng = tokenizer(kind), random.Random(kind)
    texts = [*fast.samples(MARKERS)]
    for _ in range(2000):
        left, right = rng.choice(texts), rng.choice(texts)
        text = left[: rng.randint(0, 40)] + rng.choice(BLANKS) + right[rng.randint(0, 20) :]
        texts.append(unicodedata.normalize(rng.choice(("NFC", "NFD", "NFKC", "NFKD")), text))
    for text in texts:
        assert made.encode(text) == of_library(kind, text), ascii(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["\ud800", "a\udfffb e\u0301", "\ud83d\ude00", "\0", "<|im_start|>\udc00", "\ud800\u0301"]
)
def test_surrogates_count_as_what_they_can_mean(kind: str, text: str) -> None:
    mended = text.replace("\ud83d\ude00", "\U0001f600")
    mended = "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in mended)
    assert tokenizer(kind).encode(text) == of_library(kind, mended)


def test_a_million_blanks_are_no_error() -> None:
    text = " " * 1_000_000 + "x"
    assert tokenizer("qwen2").encode(text) == of_library("qwen2", text)


def test_a_byte_that_is_no_token_is_left_out_as_the_library_does() -> None:
    absent = next(letter for letter in map(chr, range(32)) if not of_library("digits", letter))
    text = f"the{absent}re is <|im_end|>{absent}"
    assert tokenizer("digits").encode(text) == of_library("digits", text) != tokenizer("digits").encode("there is ")


def test_composing_does_not_make_or_break_added_tokens() -> None:
    made = tokenizer("qwen2")
    start, call = (made.encode(marker) for marker in ("<|im_start|>", "<tool_call>"))
    assert [len(ids(start)), len(ids(call))] == [1, 1]
    assert made.encode("<|im_start|>\u0338") == start + made.encode("\u0338")
    assert made.encode("e\u0301<tool_call>e\u0301") == made.encode("é") + call + made.encode("é")


def test_threads_may_share_one() -> None:
    made, texts = tokenizer("qwen2"), [*fast.samples(MARKERS)]
    wanted = [made.encode(text) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(text for text, encoded in zip(texts, wanted, strict=True) if made.encode(text) != encoded)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- the proof ----


def _swap_merges(made: dict[str, Any]) -> None:
    merges = made["model"]["merges"]
    merges[0], merges[400] = merges[400], merges[0]


def _forget_a_merge(made: dict[str, Any]) -> None:
    """The token stays, and its pair is merged by tiktoken alone."""
    made["model"]["merges"].pop(5)


def _flag(name: str, content: str = "<tool_call>") -> Callable[[dict[str, Any]], None]:
    def change(made: dict[str, Any]) -> None:
        next(token for token in made["added_tokens"] if token["content"] == content)[name] = True

    return change


def _also(content: str) -> Callable[[dict[str, Any]], None]:
    def change(made: dict[str, Any]) -> None:
        last = max(token["id"] for token in made["added_tokens"])
        made["added_tokens"].append({**made["added_tokens"][-1], "id": last + 1, "content": content})

    return change


UNPROVEN: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "order": ("gpt2", _swap_merges, "not in the order of the merges"),
    "missing merge": ("gpt2", _forget_a_merge, "not among the merges"),
    "suffix": ("gpt2", lambda made: made["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    "prefix": ("gpt2", lambda made: made["pre_tokenizer"].update(add_prefix_space=True), "pattern known here"),
    "no words": ("gpt2", lambda made: made["pre_tokenizer"].update(use_regex=False), "pattern known here"),
    "another pattern": (
        "qwen2",
        lambda made: made["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\S+|\s+"}),
        "pattern known here",
    ),
    "normalizer": ("gpt2", lambda made: made.update(normalizer={"type": "NFKC"}), "more than NFC"),
    "strips left": ("gpt2", _flag("lstrip"), "what is around"),
    "strips right": ("gpt2", _flag("rstrip"), "what is around"),
    "whole words": ("gpt2", _flag("single_word"), "what is around"),
    "found in composed text": ("qwen2", _flag("normalized"), "what is around"),
    "token in token": ("gpt2", _also("<tool_call>x"), "what is around"),
    "tokens overlap": ("gpt2", _also("call>x"), "what is around"),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_not_proven_is_left_to_the_library(tmp_path: Path, name: str) -> None:
    kind, change, why = UNPROVEN[name]
    made = loaded(tmp_path, change, kind)
    assert not made.fast
    assert why in made.why_slow
    wanted = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ["<tool_call> a <tool_call>xcall>x", *fast.samples(MARKERS)]:
        assert ids(made.encode(text)) == wanted.encode(text, add_special_tokens=False).ids
        assert b"".join(map(made.encode, made.pieces(text * 9))) == made.encode(text * 9)


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_a_token_that_no_merge_makes_counts_where_the_library_says(tmp_path: Path, kind: str) -> None:
    """With ignore_merges (llama3) it is found as a whole word, else never."""
    made = loaded(tmp_path, lambda made: made["model"]["vocab"].update(qzjxvk=len(made["model"]["vocab"]) + 50), kind)
    wanted = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.fast
    for text in ("qzjxvk", "qzjxvkq", " qzjxvk"):
        assert ids(made.encode(text)) == wanted.encode(text, add_special_tokens=False).ids
    assert (len(ids(made.encode("qzjxvk"))) == 1) == (kind == "llama3")


def test_merges_dropped_at_random_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="at random"):
        loaded(tmp_path, lambda made: made["model"].update(dropout=0.5))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 32), shuffled=st.booleans(), dropped=st.floats(0, 0.3), text=st.text("abc", max_size=60)
)
def test_what_the_proof_accepts_is_the_same_for_any_text(seed: int, shuffled: bool, dropped: float, text: str) -> None:
    """Tiny vocabularies over three letters, in which tokens overlap; tiktoken's rule is written out here."""
    rng, letters = random.Random(seed), {chr(point) for point in range(0x21, 0x7F)}
    model = vocabularies.tokenizer_json("gpt2")["model"]
    vocabulary = {token: at for token, at in model["vocab"].items() if len(token) == 1}
    merges: list[tuple[str, str]] = []
    known = ["a", "b", "c"]
    while len(known) < 25:
        left, right = rng.choice(known), rng.choice(known)
        if left + right in vocabulary or len(left + right) > 9:
            continue
        known.append(left + right)
        vocabulary[left + right] = len(vocabulary)
    for token in known[3:]:
        merges += [(token[:at], token[at:]) for at in range(1, len(token)) if {token[:at], token[at:]} <= {*vocabulary}]
    if shuffled:
        at = rng.randrange(len(merges))
        merges.insert(rng.randrange(len(merges)), merges.pop(at))
    merges = [merge for merge in merges if rng.random() >= dropped]
    assert letters <= vocabulary.keys()
    ranks = fast.proven_ranks({"vocab": vocabulary, "merges": merges}, ())
    if isinstance(ranks, str):
        return
    parts = [letter.encode() for letter in text]
    while parts and text.encode() not in ranks:
        scored = [(ranks[pair], at) for at in range(len(parts) - 1) if (pair := parts[at] + parts[at + 1]) in ranks]
        if not scored:
            break
        _, at = min(scored)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    else:
        parts = [text.encode()] if text else []
    library_of_merges = tokenizers.models.BPE(vocab=vocabulary, merges=merges)
    assert [ranks[part] for part in parts] == [token.id for token in library_of_merges.tokenize(text)]


# ---- pieces ----


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(text=TEXT, more=TEXT, times=st.sampled_from([1, 1, 40]))
def test_pieces_encode_as_the_whole_and_stay_when_text_is_added(kind: str, text: str, more: str, times: int) -> None:
    made, text = tokenizer(kind), text * times
    pieces = [*made.pieces(text)]
    assert "".join(pieces) == text
    assert all(pieces)
    assert b"".join(map(made.encode, pieces)) == made.encode(text)
    assert [*made.pieces(text + more)][: max(0, len(pieces) - 1)] == pieces[:-1]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=TEXT, more=TEXT)
def test_what_is_behind_the_last_fence_encodes_by_itself(kind: str, text: str, more: str) -> None:
    made = tokenizer(kind)
    at = made.last_fence(text)
    assert made.encode(text[:at]) + made.encode(text[at:] + more) == made.encode(text + more)


SEAM = re.compile(fast.SEAM)
AROUND_SEAMS = st.lists(
    st.one_of(TEXT, st.text("aZ09かガ字一 \n。，.'/", max_size=20), st.from_regex(SEAM.pattern)), max_size=6
).map("".join)


@pytest.mark.parametrize("pattern", sorted(fast.PATTERNS))
@settings(max_examples=150, deadline=None)
@given(text=AROUND_SEAMS)
def test_every_known_pattern_cuts_at_a_seam(pattern: str, text: str) -> None:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    text = text.encode("utf-8", "replace").decode()

    def words(text: str) -> list[str]:
        return [word for word, _ in split.pre_tokenize_str(text)]

    for seam in SEAM.finditer(text):
        assert words(text[: seam.end()]) + words(text[seam.end() :]) == words(text)


def test_prose_is_cut_about_every_four_kilobytes_and_a_chat_at_its_fences() -> None:
    made = tokenizer("qwen2")
    sizes = [len(piece) for piece in made.pieces("some words and more of them. " * 2000)]
    assert max(sizes) < 4200
    assert len(sizes) == 58_000 // 4097 + 1
    turn = f"<|im_start|>user\n{'word ' * 60}<|im_end|>"
    assert [*made.pieces(turn * 3)] == [turn] * 3
    assert made.last_fence(f"{turn}\n<|im_start") == len(turn)


@pytest.mark.parametrize("kind", ["metaspace-first"])
def test_a_text_is_not_cut_where_its_start_is_special(kind: str) -> None:
    text = "<|im_end|>word " * 900
    assert [*tokenizer(kind).pieces(text)] == [text]
    assert tokenizer(kind).last_fence(text) == 0


def test_many_added_tokens_of_one_stem_are_searched_at_once(tmp_path: Path) -> None:
    def change(made: dict[str, Any]) -> None:
        for at in range(300):
            _also(f"<|reserved_{at}|>")(made)

    made = loaded(tmp_path, change)
    assert made.fast
    for at in (0, 7, 29, 299):
        assert made.last_fence(f"x<|reserved_{at}|>y") == len(f"x<|reserved_{at}|>")
        assert len(ids(made.encode(f"<|reserved_{at}|>"))) == 1
    assert made.last_fence("<|reserved_300|>") == 0


# ---- what the files beside tokenizer.json add; each as AutoTokenizer of transformers 5.19 did it ----


def _id(marker: str) -> int:
    return next(
        int(token["id"]) for token in vocabularies.tokenizer_json("gpt2")["added_tokens"] if token["content"] == marker
    )


ADDED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, int]] = {
    "a named token": ({"unk_token": "<unk>"}, None, "<unk>", 1),
    "one written as an object": ({"bos_token": {"__type": "AddedToken", "content": "<bb>"}}, None, "<bb>", 1),
    "the model's own": ({"image_token": "<img>"}, None, "<img>", 1),
    "an additional one": ({"additional_special_tokens": ["<x>", "<y>"]}, None, "<y>", 2),
    "a dict of them": ({"extra_special_tokens": {"boi": "<boi>"}}, None, "<boi>", 1),
    "one of the decoder": ({"added_tokens_decoder": {"9": {"content": "<more>", "special": True}}}, None, "<more>", 1),
    "one of the map": ({}, {"cls_token": {"content": "<cls>", "lstrip": False}}, "<cls>", 1),
}


@pytest.mark.parametrize("name", ADDED)
def test_tokens_that_the_configuration_names_are_added(tmp_path: Path, name: str) -> None:
    config, special_map, token, place = ADDED[name]
    if special_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    made = loaded(tmp_path, unchanged, **config)
    last = max(map(_id, MARKERS))
    assert ids(made.encode(f"a{token}")) == [*ids(made.encode("a")), last + place]
    assert made.last_fence(f"a{token}b") == len(f"a{token}")


def test_the_map_does_not_count_beside_a_decoder(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "<cls>"}')
    assert len(ids(loaded(tmp_path, unchanged, added_tokens_decoder={}).encode("<cls>"))) > 1


def test_special_tokens_may_be_split(tmp_path: Path) -> None:
    made = loaded(tmp_path, unchanged, split_special_tokens=True)
    assert not made.fast
    assert len(ids(made.encode("<|im_start|>"))) > 1
    assert len(ids(made.encode("<tool_call>"))) == 1


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    def change(made: dict[str, Any]) -> None:
        made["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
        made["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}

    made = loaded(tmp_path, change, normalizer=None)
    assert made._encode_slowly("a b c d") == made.encode("a b c d") == tokenizer("gpt2").encode("a b c d")
    assert (made.start, made.end) == (b"", b"")


def _template(single: list[str]) -> Callable[[dict[str, Any]], None]:
    def change(made: dict[str, Any]) -> None:
        template = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=[(marker, _id(marker)) for marker in ("<|begin|>", "<|im_end|>")]
        )
        made["post_processor"] = json.loads(template.__getstate__())

    return change


@pytest.mark.parametrize(
    ("single", "start", "end"),
    [
        (["$A"], [], []),
        (["<|begin|>", "$A"], ["<|begin|>"], []),
        (["<|begin|>", "<|begin|>", "$A", "<|im_end|>"], ["<|begin|>", "<|begin|>"], ["<|im_end|>"]),
    ],
)
def test_start_and_end_are_what_the_post_processor_puts_around(
    tmp_path: Path, single: list[str], start: list[str], end: list[str]
) -> None:
    made = loaded(tmp_path, _template(single), add_bos_token=False, add_eos_token=True)  # which have no say
    assert (ids(made.start), ids(made.end)) == ([*map(_id, start)], [*map(_id, end)])


def test_a_post_processor_that_leaves_the_text_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="around"):
        loaded(tmp_path, _template(["<|begin|>"]))


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [("digits", "GPT2Tokenizer", "a  1234"), ("metaspace", "LlamaTokenizerFast", "<|im_end|>def")],
)
def test_a_class_of_transformers_5_may_cut_words_its_own_way(tmp_path: Path, kind: str, name: str, text: str) -> None:
    as_written = loaded(tmp_path, unchanged, kind, tokenizer_class=name)
    by_class = Tokenizer.load(find(str(tmp_path), revision=None), by_class=True)
    assert as_written.doubt
    assert not by_class.doubt
    assert as_written.encode(text) == tokenizer(kind).encode(text)
    changed = vocabularies.tokenizer_json(kind)
    if kind == "digits":
        changed["pre_tokenizer"] = changed["pre_tokenizer"]["pretokenizers"][1]
    else:
        changed["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        changed["model"]["unk_token"] = None
    wanted = tokenizers.Tokenizer.from_str(json.dumps(changed))
    assert as_written.encode(text) != by_class.encode(text)
    for sample in [text, *fast.samples(MARKERS)]:
        assert ids(by_class.encode(sample)) == wanted.encode(sample, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("kind", "config"),
    [("qwen2", {"tokenizer_class": "Qwen2Tokenizer"}), ("gpt2", {"tokenizer_class": "GPT2Tokenizer"})],
)
def test_a_class_that_would_change_nothing_is_no_doubt(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    assert not loaded(tmp_path, unchanged, kind, **config).doubt


# ---- files that are none ----


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"\xff", b'{"model": 1}', b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError):
        Tokenizer.load(find(str(tmp_path), revision=None))


@pytest.mark.parametrize("listed", [[], {"x": {}}, {"1": {"content": "a"}, "y": 2}, 5])
def test_an_added_tokens_decoder_of_another_form_is_refused_or_empty(tmp_path: Path, listed: Any) -> None:
    if listed == []:
        assert loaded(tmp_path, unchanged, added_tokens_decoder=listed).fast
        return
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        loaded(tmp_path, unchanged, added_tokens_decoder=listed)


# ---- rank files ----


def _rank_file(path: Path, lines: bytes | None = None, **config: Any) -> Path:
    ranks = fast.proven_ranks(vocabularies.tokenizer_json("qwen2")["model"], MARKERS)
    assert isinstance(ranks, dict)
    path.write_bytes(lines or b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path.parent


def _decoder() -> dict[str, Any]:
    return {str(token["id"]): token for token in vocabularies.tokenizer_json("qwen2")["added_tokens"]}


def test_a_rank_file_gives_the_same_ids(tmp_path: Path) -> None:
    named = {"bos_token": "<|begin|>", "add_bos_token": True, "added_tokens_decoder": _decoder()}
    made = Tokenizer.load(find(str(_rank_file(tmp_path / "qwen.tiktoken", **named)), revision=None))
    assert made.fast
    assert made.start == tokenizer("qwen2").encode("<|begin|>")
    for text in fast.samples(MARKERS):
        assert made.encode(text) == of_library("qwen2", text)
        assert [*made.pieces(text * 20)] == [*tokenizer("qwen2").pieces(text * 20)]
    with pytest.raises(TokenizerError):
        made.encode(" " * 1_000_000)


@pytest.mark.parametrize(
    ("name", "lines", "config", "says"),
    [
        ("other", None, {}, "known are: cl100k_base"),
        ("qwen", None, {}, "added_tokens_decoder"),
        ("qwen", b"x", {"added_tokens_decoder": {"5000": {"content": "<x>"}}}, "is not a rank file"),
        ("qwen", b"!! 1", {"added_tokens_decoder": {"5000": {"content": "<x>"}}}, "is not a rank file"),
        ("qwen", b"YQ== 1", {"added_tokens_decoder": {"5000": {"content": "<x>"}}}, "lacks single bytes"),
        ("qwen", None, {"added_tokens_decoder": {"7": {"content": "<x>"}}}, "share an id"),
        ("qwen", None, {"added_tokens_decoder": {"-7": {"content": "<x>"}}}, "out of range"),
        ("qwen", None, {"added_tokens_decoder": {"5000": {"content": "ab"}, "5001": {"content": "bc"}}}, "overlap"),
        (
            "qwen",
            None,
            {"added_tokens_decoder": {"5000": {"content": "<x>"}}, "bos_token": "<b>", "add_bos_token": True},
            "not among the added tokens",
        ),
    ],
)
def test_a_rank_file_that_does_not_say_enough_is_refused(
    tmp_path: Path, name: str, lines: bytes | None, config: dict[str, Any], says: str
) -> None:
    where = _rank_file(tmp_path / f"{name}.tiktoken", lines, **config)
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.load(find(str(where), revision=None))


# ---- real ones, in addition, where they lie at hand ----


def real() -> dict[str, bytes]:
    """Each tokenizer.json by name; a generated one is always among them."""
    found = {"generated": (directory("digits") / "tokenizer.json").read_bytes()}
    trained, converted = DATA / "tokenizers/smollm2_135m_tokenizer.json", DATA / "tokenizers/qwen3_tokenizer.json.zst"
    if trained.is_file():
        found["SmolLM2"] = trained.read_bytes()
    if converted.is_file():
        found["Qwen3"] = zstandard.ZstdDecompressor().stream_reader(converted.read_bytes()).read()
    return found


def test_real_vocabularies_are_proven_and_give_the_librarys_ids(tmp_path: Path) -> None:
    texts, conversations = [*fast.samples(MARKERS)], DATA / "mtbench101/mtbench101.jsonl"
    if conversations.is_file():
        turns = [json.loads(line)["history"] for line in conversations.read_text(encoding="utf-8").splitlines()[::4]]
        texts += [text for turn in turns for exchange in turn for text in exchange.values()]
    for name, data in real().items():
        (tmp_path / "tokenizer.json").write_bytes(data)
        made = Tokenizer.load(find(str(tmp_path), revision=None))
        wanted = tokenizers.Tokenizer.from_str(data.decode())
        assert made.fast, f"{name}: {made.why_slow}"
        for text in texts:
            assert ids(made.encode(text)) == wanted.encode(text, add_special_tokens=False).ids, (name, text)
