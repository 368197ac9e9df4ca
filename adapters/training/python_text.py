"""The text that the built-in Llama is trained on: the sources of Python's standard library, and its help pages.

    python adapters/training/python_text.py TRAINING HELD_OUT

writes it to two files. It is what the running Python brings along, so it differs a little from one Python to the next.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

# Tests, tables of characters, the help pages as a module, and what is not Python's own.
_LEFT_OUT = {"encodings", "ensurepip", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
_HELD_OUT = 20  # one source in so many


def documents() -> tuple[list[str], list[str]]:
    """Return the documents to train on and those held out, those of one source together.

    A whole help page, or a top-level module with all inside it, is held out or is not: neighbours resemble each other.
    """
    parts: tuple[list[str], list[str]] = [], []
    for source, texts in sorted(_sources().items(), key=lambda pair: _hash(pair[0])):
        parts[is_held_out(source)].extend(texts)
    return parts


def is_held_out(source: str) -> bool:
    """Return whether a top-level module, or "topic" and the name of one, is held out: a hash of its name decides."""
    return _hash(source) % _HELD_OUT == 0


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def _sources() -> dict[str, list[str]]:
    """Return the documents of each help page, and of each top-level module or package."""
    found = {f"topic {name}": [text] for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library).with_suffix("")
        # What was written when this Python was built speaks of the machine.
        if not _LEFT_OUT.intersection(path.parts) and not path.name.startswith("_sysconfigdata"):
            found.setdefault(path.parts[0], []).append(file.read_text(encoding="utf-8", errors="ignore"))
    return found


if __name__ == "__main__":
    for out, part in zip(sys.argv[1:], documents(), strict=True):
        Path(out).write_text("\n".join(part), encoding="utf-8")
