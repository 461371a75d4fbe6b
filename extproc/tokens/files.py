"""The files that make up a model's tokenizer, in a directory or on the Hugging Face hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import tokenizers
from tokenizers import AddedToken

from extproc.tokens import fast

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "*.tiktoken")


class TokenizerError(ValueError):
    """A tokenizer cannot be found or loaded, or cannot do what the engine's does."""


@dataclass(frozen=True, slots=True)
class Files:
    """What lies there; a file that does not is None, or empty."""

    directory: Path
    tokenizer: Path | None
    """tokenizer.json; it is large, so it is read by who needs it."""
    tiktoken: Path | None
    """A rank file; only of use where there is no tokenizer.json."""
    config: dict[str, Any]
    """tokenizer_config.json."""
    special_tokens: dict[str, Any]
    """special_tokens_map.json."""
    chat_template: str | None
    """chat_template.jinja; the engine prefers it to the one in the config."""


def find(source: str, *, revision: str | None) -> Files:
    """The files of `source`: a directory, or an id on the hub (from its cache, or downloaded, as HF_HOME and
    HF_HUB_OFFLINE say). Only at start: this may wait for the network. TokenizerError: what was looked for, and where.
    """
    directory = Path(source)
    if not directory.is_dir():
        if source.startswith(("/", ".", "~")):
            raise TokenizerError(f"no tokenizer at {source!r}: there is no such directory")
        try:
            directory = Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=list(_NAMES)))
        except (OSError, ValueError) as error:  # the hub's own errors are among them
            raise TokenizerError(
                f"no tokenizer at {source!r}: no such directory, and the Hugging Face hub gave none"
                f" (revision {revision or 'main'}): {error}"
            ) from error
    tokenizer = directory / "tokenizer.json"
    tiktoken = sorted(directory.glob("*.tiktoken"))
    if len(tiktoken) > 1 and not tokenizer.is_file():
        raise TokenizerError(f"{directory} has no tokenizer.json, and several *.tiktoken files")
    if not tokenizer.is_file() and not tiktoken:
        raise TokenizerError(f"no tokenizer at {source!r}: {directory} has neither tokenizer.json nor *.tiktoken")
    template = directory / "chat_template.jinja"
    return Files(
        directory=directory,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        tiktoken=tiktoken[0] if tiktoken else None,
        config=_mapping(directory / "tokenizer_config.json"),
        special_tokens=_mapping(directory / "special_tokens_map.json"),
        chat_template=read(template).decode("utf-8", "replace") if template.is_file() else None,
    )


def read(path: Path) -> bytes:
    """The bytes of a file; TokenizerError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object; TokenizerError when it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return found


def _mapping(path: Path) -> dict[str, Any]:
    return parse(read(path), path) if path.is_file() else {}


# ---- what Hugging Face's loader adds to tokenizer.json ----


def of_class(tokenizer: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """A tokenizer.json as transformers 5.19 rebuilds it, for some common classes; None: nothing would change.

    These take vocabulary, merges, post-processor and added tokens from the file, and bring the rest themselves. Which
    class it takes also depends on the model type, and it has a list of models for which it takes none of them.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    prefix = config.get("add_prefix_space")
    words = {
        "type": "ByteLevel",
        "add_prefix_space": bool(prefix),
        "trim_offsets": True,
        "use_regex": name == "GPT2Tokenizer",
    }
    normalizer: dict[str, Any] | None = None
    if name == "GPT2Tokenizer":
        pre_tokenizer: dict[str, Any] = words
    elif name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer"):
        pattern = {"Regex": fast.QWEN2 if name == "Qwen2Tokenizer" else fast.QWEN35}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        normalizer, pre_tokenizer = {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split, words]}
    elif name == "LlamaTokenizer":
        scheme = "never" if prefix is False else "always" if config.get("legacy") else "first"
        pre_tokenizer = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    else:
        return None
    llama = name == "LlamaTokenizer"
    model = tokenizer["model"]
    options = {"unk_token": None, "fuse_unk": llama, "byte_fallback": llama, "ignore_merges": False, "dropout": None}
    same = (
        fast.composes(tokenizer.get("normalizer")) == fast.composes(normalizer)
        and (
            tokenizer.get("pre_tokenizer") == pre_tokenizer
            or fast.word_pattern(tokenizer.get("pre_tokenizer")) == fast.word_pattern(pre_tokenizer) is not None
        )
        and all(bool(model.get(key)) == bool(value) for key, value in options.items())
    )
    if same or model.get("type") != "BPE":
        return None
    return {**tokenizer, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": {**model, **options}}


def hugging_face(data: bytes, files: Files) -> tokenizers.Tokenizer:
    """The tokenizer that `data`, a tokenizer.json, and the files beside it make for AutoTokenizer (transformers 5.19),
    without truncation and padding. What a class would change is for `of_class`.
    """
    try:
        library = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # it raises nothing narrower
        raise TokenizerError(f"cannot load {files.tokenizer}: {error}") from error
    library.no_truncation()
    library.no_padding()
    config = files.config
    library.encode_special_tokens = bool(config.get("split_special_tokens", False))
    # special_tokens_map.json is the older place, and only read without the newer one
    named = config if "added_tokens_decoder" in config else {**config, **files.special_tokens}
    known = library.get_added_tokens_decoder().values()
    contents, alike = {token.content for token in known}, {repr(token) for token in known}
    more = [token for token in added_tokens(config).values() if repr(token) not in alike]
    contents.update(token.content for token in more)
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    values = [named.get(key) for key in _SPECIAL]
    values += [value for key, value in named.items() if key.endswith("_token") and key not in _SPECIAL]
    values += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    for value in values:
        token = added_token(value, special=True)
        if token and token.content not in contents:
            contents.add(token.content)
            more.append(token)
    if more:
        library.add_tokens(more)
    return library


def added_tokens(config: dict[str, Any]) -> dict[int, AddedToken]:
    """The added tokens that tokenizer_config.json lists, by id."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        found = {int(at): added_token(value) for at, value in sorted(listed.items(), key=lambda item: int(item[0]))}
    except (AttributeError, ValueError) as error:
        raise TokenizerError(f"tokenizer_config.json: added_tokens_decoder: {error}") from error
    return {at: token for at, token in found.items() if token}


def added_token(value: Any, *, special: bool = False) -> AddedToken | None:
    """An added token as the configuration files write them: its text, or an object; None: something else."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=special, normalized=not special)
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        flags = {key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in value}
        return AddedToken(value["content"], special=special or bool(value.get("special", False)), **flags)
    return None
