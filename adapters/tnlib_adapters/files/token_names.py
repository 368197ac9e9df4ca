"""What the tokenizer of a folder calls its tokens, read from its files without a tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tnlib import FileFormatError

TOKENIZER = "tokenizer.json"
_WORDS = "vocab.json"  # of byte-level tokenizers
_LINES = "vocab.txt"  # of word pieces


def token_names(folder: Path) -> dict[int, str] | None:
    """Return the text of every token by its number; None where the folder holds no tokenizer that is known.

    Raises
    ------
    FileFormatError
        If a file of the tokenizer is damaged.
    """
    if (folder / TOKENIZER).is_file():
        return _from_tokenizer(_load(folder / TOKENIZER))
    if (folder / _WORDS).is_file():
        return {number: _from_bytes(word) for word, number in _load(folder / _WORDS).items()}
    if (folder / _LINES).is_file():
        return dict(enumerate((folder / _LINES).read_text(encoding="utf-8").splitlines()))
    return None


def _from_tokenizer(told: Any) -> dict[int, str] | None:
    vocab = told.get("model", {}).get("vocab")
    if isinstance(vocab, dict):
        names = {number: word for word, number in vocab.items()}
    elif isinstance(vocab, list):  # pieces with their scores
        names = {number: piece for number, (piece, _) in enumerate(vocab)}
    else:
        return None
    spoken = _from_bytes if '"ByteLevel"' in json.dumps([told.get("decoder"), told.get("pre_tokenizer")]) else _plain
    added = {one["id"]: one["content"] for one in told.get("added_tokens", [])}
    return {number: spoken(word) for number, word in names.items()} | added


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise FileFormatError(
            f"token_names: {file} must be JSON, got {problem}; save the tokenizer again, or take the file away."
        ) from None


def _plain(word: str) -> str:
    return word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")  # a space as sentence pieces write it


def _from_bytes(word: str) -> str:
    """Undo the letters that stand for bytes; what is no whole letter is written as its bytes."""
    if any(letter not in _BYTES for letter in word):
        return word
    stored = bytes(_BYTES[letter] for letter in word)
    try:
        return stored.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in stored)


def _byte_letters() -> dict[str, int]:
    """Return the byte behind each letter: printable ones stand for themselves, the others for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_BYTES = _byte_letters()
