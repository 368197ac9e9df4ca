"""The text that the built-in Llama is trained on: what Python's own documentation says, as `help` shows it.

    python adapters/training/pydoc_text.py TRAINING HELD_OUT

writes it to two files. It is the topics of pydoc and the docstrings of the standard library's Python sources,
each under the name and signature of what it describes, so it differs a little from one Python to the next.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

# Folders of tests, of programs, and of what is not Python's own.
_LEFT_OUT = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
_HELD_OUT = 20  # one source in so many
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documents() -> tuple[list[str], list[str]]:
    """Return the documents to train on and those held out, each once, those of one source together.

    A whole topic or top-level module is held out or is not, by a hash of its name: neighbours resemble each other.
    """
    parts: tuple[list[str], list[str]] = [], []
    seen = set()
    for source, texts in sorted(_sources().items(), key=lambda pair: _hash(pair[0])):
        for text in texts:
            if text not in seen:
                seen.add(text)
                parts[_hash(source) % _HELD_OUT == 0].append(text)
    return parts


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def _sources() -> dict[str, list[str]]:
    """Return the documents of each topic and of each top-level module or package."""
    found = {f"topic {name}": [text.strip() + "\n"] for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library).with_suffix("")
        if not _LEFT_OUT.intersection(path.parts):
            module = ".".join(path.parts).removesuffix(".__init__")
            found.setdefault(path.parts[0], []).extend(_described(ast.parse(file.read_bytes()), module))
    return found


def _described(node: _Documented, name: str) -> Iterator[str]:
    """Yield "name(signature)" and the docstring, of a module, class or function and of all inside it."""
    docstring = ast.get_docstring(node)
    if docstring and len(docstring.split()) > 3:
        signature = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        yield f"{name}{signature}\n\n{inspect.cleandoc(docstring).strip()}\n"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _described(child, f"{name}.{child.name}")


if __name__ == "__main__":
    for out, part in zip(sys.argv[1:], documents(), strict=True):
        Path(out).write_text("\n".join(part), encoding="utf-8")
