"""Read, split and sample calibration text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError, MissingFileError
from tnlib._validate import as_path

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch

_HELD_OUT = 10  # one line in 10 is held out


def read_text(function: str, parameter: str, path: str | os.PathLike[str]) -> str:
    """Return the text of a file in UTF-8; of JSON Lines (*.jsonl), the joined strings "text" of all lines.

    Raises
    ------
    MissingFileError, ArgumentError
        If there is no such file, it is not UTF-8 text, a line of JSON Lines has no "text", or the text is empty.
    """
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
    if file.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)  # splitlines() would cut strings at U+2028
        text = "\n".join(_text_of(function, parameter, file, k, line) for k, line in lines if line.strip())
    if not text.strip():
        raise ArgumentError(f"{function}: {parameter} must hold text, got none in {file}; name another file.")
    return text


def _text_of(function: str, parameter: str, file: Path, number: int, line: str) -> str:
    """Return the string "text" of one line of JSON Lines."""
    try:
        content = json.loads(line)
        text = content.get("text") if isinstance(content, dict) else None
        if isinstance(text, str):
            text.encode()  # half of a surrogate pair is no text
            return text
    except (ValueError, RecursionError):
        pass
    raise ArgumentError(
        f'{function}: {parameter} must have an object with a string "text" in every line, got another value in line '
        f"{number} of {file}; write the file anew, or pass plain text."
    )


def hold_out(text: str) -> tuple[str, str]:
    """Return nine tenths of the lines of a text, and the held-out tenth, sampled with a fixed seed."""
    lines = [line for line in text.splitlines() if line.strip()]
    block = max(1, len(lines) // 100)  # neighbouring lines stay together: context is part of a text
    blocks = [lines[start : start + block] for start in range(0, len(lines), block)]
    held_out = set(np.random.default_rng(0).permutation(len(blocks))[: len(blocks) // _HELD_OUT].tolist())
    calibration = [line for k, lines_of_block in enumerate(blocks) if k not in held_out for line in lines_of_block]
    evaluation = [line for k, lines_of_block in enumerate(blocks) if k in held_out for line in lines_of_block]
    return "\n".join(calibration), "\n".join(evaluation)


def sample_batches(batches: Sequence[Batch], n_tokens: int) -> list[Batch]:
    """Return batches with about `n_tokens` tokens in total, sampled with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(batches))
    so_far = np.cumsum([batches[k].n_tokens for k in order])
    return [batches[k] for k in order[: int(np.searchsorted(so_far, n_tokens)) + 1]]


def check_tokens(function: str, batches: Sequence[Batch], least: int, of: str = "inputs") -> None:
    """Raise if a text has fewer tokens than the widest weight has inputs (or `of`): the moments would be singular."""
    n_tokens = sum(batch.n_tokens for batch in batches)
    if n_tokens < least:
        raise ArgumentError(
            f"{function}: the calibration text must have at least {least:,} tokens for weights with {least:,} {of}, "
            f"got {n_tokens:,}, {least - n_tokens:,} too few; add text."
        )
