"""The tokenizer of a checkpoint folder: names of its tokens, and the tokenizer itself loaded by transformers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from tnlib import ArgumentError, FileFormatError
from tnlib_adapters.files.atomic_folder import check_text_path
from tnlib_adapters.files.json_file import JsonFile

TOKENIZER = "tokenizer.json"
_WORDS = "vocab.json"  # of byte-level tokenizers
_LINES = "vocab.txt"  # of word pieces
_FILES = (TOKENIZER, "tokenizer.model", "spiece.model", _LINES, _WORDS)  # a folder with a tokenizer has one of them
T = TypeVar("T")

MAX_TOKENS = 256  # of a line of text, or of a window for a model that predicts tokens

# arguments of every call of from_pretrained: no download, no code from the folder
OFFLINE = {"local_files_only": True, "trust_remote_code": False}


def token_names(folder: Path, function: str = "token_names") -> dict[int, str] | None:
    """Return the text of every token by its number; None if the folder holds no known tokenizer.

    `FileFormatError`, with a message that begins with `function`, if a file is damaged or holds values of another type.
    """
    for name, read in ((TOKENIZER, _from_tokenizer), (_WORDS, _from_words), (_LINES, _from_lines)):
        if (folder / name).is_file():
            return read(JsonFile(function, folder / name, "save the tokenizer again, or take the file away"))
    return None


def _from_tokenizer(file: JsonFile) -> dict[int, str] | None:
    content = file.read()
    model = file.of_type(dict, content.get("model", {}), "model")
    if "vocab" not in model:
        return None
    if isinstance(model["vocab"], list):  # of a unigram model: pieces and their scores
        names = dict(enumerate(_piece(file, entry, k) for k, entry in enumerate(model["vocab"])))
    else:
        names = _numbered_words(file, model["vocab"], "model.vocab")
    is_byte_level = '"ByteLevel"' in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
    decode = _from_bytes if is_byte_level else _plain
    added = {}
    for k, entry in enumerate(file.of_type(list, content.get("added_tokens", []), "added_tokens")):
        token = file.of_type(dict, entry, f"added_tokens[{k}]")
        number = file.as_index(token.get("id"), f"added_tokens[{k}].id")
        added[number] = file.of_type(str, token.get("content"), f"added_tokens[{k}].content")
    return {number: decode(word) for number, word in names.items()} | added


def _piece(file: JsonFile, entry: object, k: int) -> str:
    if not isinstance(entry, list) or len(entry) != 2 or type(entry[1]) not in (int, float):
        file.refuse(f"model.vocab[{k}]", "a piece and its score", entry)
    return file.of_type(str, entry[0], f"model.vocab[{k}]")


def _from_words(file: JsonFile) -> dict[int, str]:
    return {number: _from_bytes(word) for number, word in _numbered_words(file, file.read(), "").items()}


def _numbered_words(file: JsonFile, content: object, place: str) -> dict[int, str]:
    """Return the words of a JSON object from words to numbers."""
    words = file.of_type(dict, content, place)
    return {file.as_index(number, place): word for word, number in words.items()}


def _from_lines(file: JsonFile) -> dict[int, str]:
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        file.refuse("", "text in UTF-8", str(problem))
    lines = io.StringIO(text, newline=None)  # only line breaks separate words, not every character of str.splitlines
    return dict(enumerate(line.removesuffix("\n") for line in lines))


def _plain(word: str) -> str:
    return word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")  # a space as sentence pieces write it


def _from_bytes(word: str) -> str:
    """Decode a word of byte letters; bytes that are no UTF-8 are written as <0xFF>."""
    try:
        stored = word.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # a letter that stands for no byte
        return word
    try:
        return stored.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in stored)


def _byte_letters() -> dict[int, int]:
    """Return the byte behind each letter: printable ones stand for themselves, the others for 256, 257, ...

    Letters below 256 that stand for no byte map to one above.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return dict.fromkeys(others, 0xFFFF) | {256 + k: byte for k, byte in enumerate(others)}


_BYTES = _byte_letters()


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer; from any other transformers would make one without words."""
    return any((folder / name).is_file() for name in _FILES)


def tokenizer_or_none(function: str, folder: Path) -> Any:
    """Return the tokenizer of a folder, None if there is none or transformers is not installed."""
    return load_tokenizer(function, folder) if has_tokenizer(folder) and find_spec("transformers") else None


def load_tokenizer(function: str, folder: Path) -> Any:
    """Return the tokenizer of a folder; code in the folder is not run.

    `ArgumentError` if the path of the folder is no UTF-8, `FileFormatError` with the cause if it does not load.
    """
    check_text_path(function, "the checkpoint", folder)
    load = _tokenizer_class(function, folder).from_pretrained
    return loaded(function, f"the tokenizer of {folder}", lambda: load(str(folder), **OFFLINE))


def _tokenizer_class(function: str, folder: Path) -> Any:
    """Return the class of transformers that loads the tokenizer of a folder.

    AutoTokenizer imports torch, which takes seconds; a folder that names the class of tokenizer.json does not need it.
    """
    path = folder / "tokenizer_config.json"
    if path.is_file() and (folder / TOKENIZER).is_file():
        content = JsonFile(function, path, "save the tokenizer again").read()
        if content.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def loaded(function: str, what: str, load: Callable[[], T]) -> T:
    """Return load(), with an exception of transformers as one FileFormatError that names its cause."""
    try:
        return load()
    except (ArgumentError, FileFormatError, MemoryError):
        raise
    except Exception as problem:  # tokenizers raises Exception itself where a file is damaged
        cause = " ".join(str(problem).split())[:300]
        raise FileFormatError(
            f"{function}: {what} must load in transformers, got {type(problem).__name__}: {cause}; "
            "download the checkpoint again."
        ) from problem
