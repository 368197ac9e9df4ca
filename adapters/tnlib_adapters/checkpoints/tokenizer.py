"""Load the tokenizer of a checkpoint folder with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tnlib import ArgumentError, FileFormatError

T = TypeVar("T")

# arguments of every call of from_pretrained: no download, no code from the folder
OFFLINE = {"local_files_only": True, "trust_remote_code": False}


def load_tokenizer(function: str, folder: Path) -> Any:
    """Return the tokenizer of a folder; code in the folder is not run.

    Raises
    ------
    FileFormatError
        If transformers cannot load it; the message contains the cause.
    """
    from transformers import AutoTokenizer

    return loaded(function, f"the tokenizer of {folder}", lambda: AutoTokenizer.from_pretrained(str(folder), **OFFLINE))


def loaded(function: str, what: str, load: Callable[[], T]) -> T:
    """Return load(), with an exception of transformers as one FileFormatError that names its cause."""
    try:
        return load()
    except (ArgumentError, FileFormatError, MemoryError):
        raise
    except Exception as problem:  # transformers passes on arbitrary exceptions of its parsers
        cause = " ".join(str(problem).split())[:300]
        raise FileFormatError(
            f"{function}: {what} must load in transformers, got {type(problem).__name__}: {cause}; "
            "download the checkpoint again."
        ) from problem
