"""Tokenize a text into numbers and printable names."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.files.folder import TOKENIZERS
from tnlib_adapters.files.tokenizer import load_tokenizer, token_names

_MOST = 96  # tokens; larger patterns are not legible in a picture
_LETTERS = 50 * _MOST  # characters that are tokenized: enough for more than _MOST tokens


@dataclass(frozen=True, eq=False)
class Tokens:
    """One token sequence: numbers (n,), printable names, and whether the text was truncated."""

    ids: Array
    names: tuple[str, ...]
    cut: bool


def read_tokens(checkpoint: Checkpoint, text: str) -> Tokens:
    """Return a text as tokens by the tokenizer of the folder, or parse token numbers if there is no tokenizer.

    Raises
    ------
    ArgumentError
        If the model reads images, the text has fewer than two tokens, or is not token numbers where there is no
        tokenizer.
    """
    if checkpoint.wiring.reads != "tokens":
        raise ArgumentError(
            f"inspect: text must be left out for a model of images, got one for a {checkpoint.wiring.model_type}."
        )
    names = token_names(checkpoint.folder.path, "inspect") or {}
    limit, tokenizer = _longest(checkpoint), _tokenizer(checkpoint)
    if tokenizer is None:
        numbers = _numbers(checkpoint, text)
        truncated, numbers = len(numbers) > limit, numbers[:limit]
    else:
        start = text[:_LETTERS]
        truncated = len(text) > _LETTERS or len(tokenizer(start, verbose=False)["input_ids"]) > limit
        numbers = tokenizer(start, truncation=True, max_length=limit)["input_ids"]  # includes end markers
    if len(numbers) < 2:
        raise ArgumentError(f"inspect: text must hold at least two tokens, got {len(numbers)}; pass a longer one.")
    return Tokens(np.array(numbers), tuple(_visible(names.get(number, str(number))) for number in numbers), truncated)


def own_tokens(checkpoint: Checkpoint) -> Tokens | None:
    """Return a sequence like the training data of the built-in model; None for any other model."""
    if not checkpoint.wiring.is_attention_only or _vocabulary(checkpoint) < 2:
        return None
    rng = np.random.default_rng(0)
    segment = rng.permutation(min(128, _vocabulary(checkpoint)))[: min(16, _longest(checkpoint) // 2)]
    ids = np.concatenate([segment, segment])
    return Tokens(ids, tuple(map(str, ids)), cut=False)


def _longest(checkpoint: Checkpoint) -> int:
    """Return the largest number of tokens of a sequence."""
    wiring = checkpoint.wiring
    return int(min(_MOST, (wiring.context or _MOST) - wiring.embedding.first_position))


def _vocabulary(checkpoint: Checkpoint) -> int:
    info = checkpoint.locate(checkpoint.wiring.embedding.table.weight)
    return 0 if info is None else int(info.shape[0])


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer of the folder, None if there is none or transformers is not installed."""
    folder = checkpoint.folder.path
    if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would return an empty tokenizer
        return None
    if find_spec("transformers") is None:
        return None
    return load_tokenizer("inspect", folder)


def _visible(name: str) -> str:
    """Return a token with visible signs for blanks and line breaks."""
    visible = name.replace(" ", "·").replace("\n", "↵").replace("\r", "↵").replace("\t", "⇥")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in visible)


def _numbers(checkpoint: Checkpoint, text: str) -> list[int]:
    """Parse token numbers, separated by blanks or commas."""
    vocab, parts = _vocabulary(checkpoint), text.replace(",", " ").split()
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < vocab):
            raise ArgumentError(
                f"inspect: text must be numbers of tokens from 0 to {vocab - 1}, because there is no tokenizer for "
                f"{checkpoint.folder.path}, or no transformers to read it with; got {part[:40]!r}."
            )
    return [int(part) for part in parts]
