"""Calibration data: read documents from a file, hold sequences of tokens out, sample batches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tnlib import ArgumentError, MissingFileError
from tnlib._typing import Array
from tnlib._validate import as_path, import_optional

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch, Document

FEWEST_SEQUENCES = 3  # of which one is held out

S = TypeVar("S")
TokenSequences = Sequence[Sequence[int]]

_HELD_OUT = 10  # one sequence in 10 is held out, of a short text one of three
_RECORDS = 'an object with a string "text", or with a list "messages" of objects with strings "role" and "content",'


def read_text(function: str, parameter: str, path: str | os.PathLike[str]) -> str:
    """Return the text of a file in UTF-8; `MissingFileError` or `ArgumentError` if there is none in it."""
    file = as_path(function, parameter, path)
    if not file.is_file():
        raise MissingFileError(f"{function}: {parameter} must be a text file, found none at {file}; check the path.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ArgumentError(
            f"{function}: {parameter} must be text in UTF-8, got byte 0x{problem.object[problem.start]:02x} at "
            f"position {problem.start} of {file}; convert it first."
        ) from None
    if not text.strip():
        raise ArgumentError(f"{function}: {parameter} must hold text, got none in {file}; name another file.")
    return text


def read_documents(function: str, parameter: str, path: str | os.PathLike[str]) -> list[Document]:
    """Return the documents of a file: strings, conversations, or token ids; an error if there are none.

    Of a text file the only document is its text. JSON Lines (*.jsonl) hold one in every line, a string "text" or a list
    "messages"; so do the rows of a dataset that the library datasets saved into a folder. A file *.npy holds token ids
    of one document (tokens,), or of several (documents, tokens).
    """
    file = as_path(function, parameter, path)
    documents: list[Document]
    if any((file / name).is_file() for name in ("state.json", "dataset_dict.json")):
        documents = [_of_record(function, parameter, file, k, row) for k, row in enumerate(_rows(function, file), 1)]
    elif file.suffix == ".npy":
        documents = _token_ids(function, parameter, file)
    else:
        text = read_text(function, parameter, file)
        if file.suffix != ".jsonl":
            return [text]
        lines = enumerate(text.split("\n"), 1)  # splitlines() would cut strings at U+2028
        documents = [_of_record(function, parameter, file, k, _parsed(line)) for k, line in lines if line.strip()]
    if not any(len(document) for document in documents):
        raise ArgumentError(f"{function}: {parameter} must hold text, got none in {file}; name another file.")
    return documents


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _of_record(function: str, parameter: str, file: Path, number: int, record: Any) -> Document:
    """Return the document of one line of JSON Lines, or of one row of a dataset."""
    if isinstance(record, dict):
        text, messages = record.get("text"), record.get("messages")
        if isinstance(text, str) and _is_encodable(text):
            return text
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return [{"role": message["role"], "content": message["content"]} for message in messages]
    raise ArgumentError(
        f"{function}: {parameter} must have {_RECORDS} in every line, got another value in line {number} of {file}; "
        "write the file anew, or pass plain text."
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) and _is_encodable(message[key]) for key in ("role", "content")
    )


def _is_encodable(text: str) -> bool:
    """Return False for text with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_ids(function: str, parameter: str, file: Path) -> list[Document]:
    if not file.is_file():
        raise MissingFileError(f"{function}: {parameter} must be a file, found none at {file}; check the path.")
    try:
        ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError):
        ids = None
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        content = "another file" if ids is None else f"{ids.dtype} of shape {getattr(ids, 'shape', None)}"
        raise ArgumentError(
            f"{function}: {parameter} must hold integers (tokens,) or (documents, tokens), got {content} in {file}; "
            "save token ids by numpy.save, or pass text."
        )
    rows: Array = np.atleast_2d(ids).astype(np.int64)
    return list(rows)


def _rows(function: str, folder: Path) -> Iterator[Any]:
    datasets = import_optional(f"{function}: a folder of calibration data", "datasets", "datasets")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError, KeyError, TypeError, OSError) as problem:
        raise ArgumentError(
            f"{function}: calibration must be a file, or a folder that datasets saved, got {folder} "
            f"({type(problem).__name__}); name another."
        ) from None
    if hasattr(loaded, "keys"):
        raise ArgumentError(
            f"{function}: calibration must be one split of a dataset, got {', '.join(loaded)} in {folder}; name the "
            "folder of one of them."
        )
    yield from loaded


def hold_out(sequences: Sequence[S]) -> tuple[list[S], list[S]]:
    """Return nine tenths of the sequences of a text, and the held-out tenth, sampled with a fixed seed.

    Of three or more sequences at least one is held out.
    """
    block = max(1, len(sequences) // 100)  # neighbouring sequences stay together: context is part of a text
    blocks = [sequences[start : start + block] for start in range(0, len(sequences), block)]
    count = max(len(blocks) // _HELD_OUT, int(len(blocks) >= FEWEST_SEQUENCES))
    held_out = set(np.random.default_rng(0).permutation(len(blocks))[:count].tolist())
    calibration = [sequence for k, of_block in enumerate(blocks) if k not in held_out for sequence in of_block]
    evaluation = [sequence for k, of_block in enumerate(blocks) if k in held_out for sequence in of_block]
    return calibration, evaluation


def sample_batches(batches: Sequence[Batch], n_tokens: int) -> list[Batch]:
    """Return batches with about `n_tokens` tokens in total, sampled with a fixed seed."""
    return first_batches([batches[k] for k in np.random.default_rng(0).permutation(len(batches))], n_tokens)


def first_batches(batches: Sequence[Batch], n_tokens: int) -> list[Batch]:
    """Return the first batches with about `n_tokens` tokens in total."""
    so_far = np.cumsum([batch.n_tokens for batch in batches])
    return list(batches[: int(np.searchsorted(so_far, n_tokens)) + 1])


def check_tokens(function: str, batches: Sequence[Batch], least: int) -> None:
    """Raise if a text has fewer tokens than the widest weight has components: the moments would be singular."""
    n_tokens = sum(batch.n_tokens for batch in batches)
    if n_tokens < least:
        raise ArgumentError(
            f"{function}: the calibration text must have at least {least:,} tokens, the largest rank of a weight, "
            f"got {n_tokens:,}, {least - n_tokens:,} too few; add text, better some ten thousand tokens."
        )
