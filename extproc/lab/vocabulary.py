"""A tokenizer and a chat template where no model is at hand: a byte-level BPE of Python's own sources, made in 10 s."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from extproc.tokens import fast

TOKENS = 16_000

CHATML = (
    "{%- if tools %}<|im_start|>system\n{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json of the kind that Qwen has; returns `directory`."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(fast.QWEN2), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=alphabet, show_progress=False)
    made.train([str(path) for path in sources], trainer)
    made.add_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in ("im_start", "im_end")])
    written = with_every_split(json.loads(made.to_str()))
    (directory / "tokenizer.json").write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}), encoding="utf-8")
    return directory


def with_every_split(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """As converters from tiktoken write it: each way to make a token of two is a merge."""
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["merges"] = [
        [token[:at], token[at:]]
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    return tokenizer
