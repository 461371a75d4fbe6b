"""Small tokenizers made by code, each in a directory that vLLM can load: trained on Python's sources, in a second."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from extproc.lab.vocabulary import with_every_split
from extproc.tokens import fast

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ '\n' + message.content }}"
    "{%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<tool_call>", "</tool_call>")
"""The added tokens of each; the last two are not special."""

VOCABULARY = 2000


def _corpus() -> list[str]:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    letters = "".join(
        map(chr, (*range(0xA1, 0x250), *range(0x391, 0x460), *range(0x4E00, 0x4F00), *range(0x1F600, 0x1F650)))
    )
    return [path.read_text(encoding="utf-8")[:30_000] for path in sources] + [f"{letters}\n{letters} "] * 3


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _trained(normalizer: Any, pre_tokenizer: Any, decoder: Any, model: Any, trainer: Any) -> dict[str, Any]:
    """A tokenizer.json, the markers added behind the vocabulary."""
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.decoder = decoder
    made.train_from_iterator(_corpus(), trainer)
    made.add_tokens([AddedToken(marker, special="|" in marker, normalized=False) for marker in MARKERS])
    return dict(json.loads(made.to_str()))


def _byte_level(pre_tokenizer: Any, normalizer: Any = None) -> dict[str, Any]:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    return _trained(normalizer, pre_tokenizer, decoders.ByteLevel(), models.BPE(), trainer)


def _gpt2() -> dict[str, Any]:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _digits() -> dict[str, Any]:
    """As SmolLM2 and StarCoder have it; its alphabet is only what it was trained on."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    return _trained(None, pre_tokenizers.Sequence(steps), decoders.ByteLevel(), models.BPE(), trainer)


def _qwen2() -> dict[str, Any]:
    return with_every_split(_byte_level(_split(fast.QWEN2), normalizers.NFC()))


def _o200k() -> dict[str, Any]:
    return with_every_split(_byte_level(_split(fast.O200K)))


def _llama3() -> dict[str, Any]:
    tokenizer = with_every_split(_byte_level(_split(fast.LLAMA3)))
    tokenizer["model"]["ignore_merges"] = True
    begin = tokenizer["added_tokens"][MARKERS.index("<|begin|>")]
    template = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", begin["id"])]
    )
    tokenizer["post_processor"] = json.loads(template.__getstate__())
    return tokenizer


def _sentencepiece(scheme: str) -> dict[str, Any]:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>", *fallback], limit_alphabet=400, show_progress=False
    )
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = _trained(None, metaspace, decoder, model, trainer)
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in fallback]
    return tokenizer


def _wordpiece() -> dict[str, Any]:
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=["[UNK]"], show_progress=False)
    return _trained(
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
        models.WordPiece(unk_token="[UNK]"),
        trainer,
    )


_MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "digits": _digits,
    "qwen2": _qwen2,
    "o200k": _o200k,
    "llama3": _llama3,
    "metaspace": lambda: _sentencepiece("always"),
    "metaspace-first": lambda: _sentencepiece("first"),
    "wordpiece": _wordpiece,
}
KINDS = tuple(_MAKERS)
FAST = ("gpt2", "digits", "qwen2", "o200k", "llama3")
"""Those that tiktoken can do."""


@cache
def _serialized(kind: str) -> str:
    return json.dumps(_MAKERS[kind](), ensure_ascii=False)


def tokenizer_json(kind: str) -> dict[str, Any]:
    """A fresh copy, to be changed at will; trained once a process."""
    return dict(json.loads(_serialized(kind)))


def write(directory: Path, tokenizer: dict[str, Any], **config: Any) -> Path:
    """Writes `tokenizer` as tokenizer.json, and a tokenizer_config.json with the chat template and `config`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **config}), encoding="utf-8")
    return directory


def make(kind: str, directory: Path) -> Path:
    """The directory with a tokenizer of that kind in it."""
    more: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False} if kind == "qwen2" else {}
    return write(directory, tokenizer_json(kind), **more)
