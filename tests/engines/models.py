"""Models that vLLM serves without weights (`--load-format dummy`): tiny, but with whole tokenizers and templates.

Those that are generated are always there. Where ../shared/data is, published tokenizers and templates come beside them.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import sysconfig
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SHARED = Path(__file__).parents[3] / "shared" / "data"
"""Published data beside the checkout; in addition, never needed."""

_TEMPLATES = Path(__file__).with_name("templates")
_TOKENIZERS = SHARED / "tokenizers"
_VOCABULARY = 4096
_HIDDEN, _LAYERS, _HEADS, _HEAD = 64, 2, 2, 32
_LORA_RANK = 8

Make = Callable[[Path], None]


def makers() -> dict[str, Make]:
    """By name, what writes a model's tokenizer and template into a directory."""
    made: dict[str, Make] = {"parts": _parts, "thinking": _thinking, "inst": _inst}
    if _TOKENIZERS.is_dir():
        made |= {
            "qwen3": _qwen3,
            "smollm2": _smollm2,
            "llama-3.1": _llama31,
            "hermes-3": _hermes3,
            "mistral-nemo": _nemo,
        }
    return made


def make(name: str, directory: Path) -> Path:
    """The model `name`, in a directory of that name below `directory`."""
    target = directory / name
    target.mkdir()
    makers()[name](target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    end = tokenizer.token_to_id(json.loads((target / "tokenizer_config.json").read_text())["eos_token"])
    _write(target / "config.json", _config(size, end))
    _write(target / "generation_config.json", {"eos_token_id": end})
    return target


def make_adapter(model: Path, target: Path) -> Path:
    """A LoRA adapter for `model` that changes little; its weights are the same each time."""
    target.mkdir()
    tensors: dict[str, tuple[int, int]] = {}
    for layer in range(_LAYERS):
        for projection, outputs in (("q_proj", _HEADS * _HEAD), ("v_proj", _HEAD)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{name}.lora_A.weight"] = (_LORA_RANK, _HIDDEN)
            tensors[f"{name}.lora_B.weight"] = (outputs, _LORA_RANK)
    header, data = {}, b""
    for name, (rows, columns) in tensors.items():
        values = [((7 * i) % 13 - 6) / 100 for i in range(rows * columns)]
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    head = json.dumps(header).encode()
    (target / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _LORA_RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": str(model),
    }
    _write(target / "adapter_config.json", adapter)
    return target


def _config(vocabulary: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": _HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": end,
    }


# ---- generated ----


def _parts(target: Path) -> None:
    """Byte-level BPE that adds a token before every text, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|finish|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>"]
    _train(tokenizer, specials, pre_tokenizers.ByteLevel.alphabet())
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)]
    )
    _save(tokenizer, target, (_TEMPLATES / "parts.jinja").read_text(), bos_token="<|begin|>", eos_token="<|end|>")


def _thinking(target: Path) -> None:
    """Byte-level BPE behind NFC, digits one by one, as Qwen has it; adds nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ("<think>", "</think>", "<tool_call>")])
    template = (_TEMPLATES / "thinking.jinja").read_text()
    _save(tokenizer, target, template, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _inst(target: Path) -> None:
    """BPE over characters with bytes for the rest and U+2581 for spaces, as SentencePiece makes them for Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _train(tokenizer, ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))], [])
    # trained with words apart, used without: as those vocabularies are
    raw = json.loads(tokenizer.to_str())
    raw["pre_tokenizer"] = None
    raw["added_tokens"] = [each for each in raw["added_tokens"] if not each["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
    )
    template = (_TEMPLATES / "inst.jinja").read_text()
    _save(
        tokenizer,
        target,
        template,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        tokenizer_class="LlamaTokenizerFast",
    )


def _train(tokenizer: Tokenizer, specials: list[str], alphabet: list[str]) -> None:
    """On the standard library's own source: the same on every machine with that Python, and no data to carry."""
    files = sorted(str(each) for each in Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train(files, trainer)


def _save(tokenizer: Tokenizer, target: Path, template: str, **special: str | None) -> None:
    tokenizer.save(str(target / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    _write(target / "tokenizer_config.json", config)
    (target / "chat_template.jinja").write_text(template)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


# ---- published ----


def _qwen3(target: Path) -> None:
    (target / "tokenizer.json").write_bytes(unpacked(_TOKENIZERS / "qwen3_tokenizer.json.zst"))
    shutil.copyfile(_TOKENIZERS / "qwen3_tokenizer_config.json", target / "tokenizer_config.json")


def _smollm2(target: Path) -> None:
    tokenizer = Tokenizer.from_file(str(_TOKENIZERS / "smollm2_135m_tokenizer.json"))
    template = (_TOKENIZERS / "smollm2_chat_template.jinja").read_text()
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer"}
    _save(tokenizer, target, template, **named)


def _llama31(target: Path) -> None:
    tokenizer = Tokenizer.from_file(str(_TOKENIZERS / "smollm2_135m_tokenizer.json"))
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag")
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[("<|begin_of_text|>", begin)]
    )
    template = _published("meta-llama-Llama-3.1-8B-Instruct")
    _save(tokenizer, target, template, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def _hermes3(target: Path) -> None:
    """With a template of its own for requests with tools."""
    tokenizer = Tokenizer.from_str(unpacked(_TOKENIZERS / "qwen3_tokenizer.json.zst").decode())
    tokenizer.save(str(target / "tokenizer.json"))
    named = {
        "default": (_TEMPLATES / "thinking.jinja").read_text(),
        "tool_use": _published("NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "eos_token": "<|im_end|>",
        "chat_template": [{"name": name, "template": template} for name, template in named.items()],
    }
    _write(target / "tokenizer_config.json", config)


def _nemo(target: Path) -> None:
    tokenizer = Tokenizer.from_file(str(_TOKENIZERS / "smollm2_135m_tokenizer.json"))
    names = ("INST", "/INST", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "/TOOL_RESULTS")
    tokenizer.add_special_tokens(["<s>", "</s>", *(f"[{name}]" for name in names)])
    template = _published("mistralai-Mistral-Nemo-Instruct-2407")
    _save(tokenizer, target, template, bos_token="<s>", eos_token="</s>")


def _published(template: str) -> str:
    packed = unpacked(_TOKENIZERS / "llama_cpp_chat_templates.tar.zst")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile(f"templates/{template}.jinja")
        assert member is not None
        return member.read().decode()


def unpacked(path: Path) -> bytes:
    """A zstd file of ../shared/data."""
    import zstandard

    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()
