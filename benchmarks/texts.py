"""English sentences of Python's documentation and of the manuals, licences and package notes of a Debian system.

    python -m benchmarks.texts [--write]

These texts belong to others and are not in the repository. `tested_sentences.txt` has the digests of the sentences that
the tables of the study are measured on, so that other systems measure on the same ones or refuse. Without --write the
command says how many of them this system has; with it they are drawn again.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import click
import numpy as np

TESTED = 300  # sentences of each kind in `TEST_KINDS`
TEST_KINDS = ("manuals", "reference")  # on which compressed models are measured
_PINNED = Path(__file__).parent / "tested_sentences.txt"


def sentences(kind: str, count: int, seed: int = 0, without: Collection[str] = ()) -> list[str]:
    """Return sentences of one of `KINDS`, 40 to 200 characters long, drawn at random; fewer where there are fewer.

    Those in `without` are left out.
    """
    found = _all(kind)
    drawn = (found[k] for k in np.random.default_rng(seed).permutation(len(found)))
    return list(itertools.islice((sentence for sentence in drawn if sentence not in without), count))


def tested_sentences(kind: str) -> list[str]:
    """Return the pinned sentences of one of `TEST_KINDS`, in their order; refuses if the system lacks any."""
    wanted, found = _pinned(kind), {_digest(sentence): sentence for sentence in _all(kind)}
    if missing := len(wanted.keys() - found.keys()):
        raise click.ClickException(
            f"this system lacks {missing} of the {len(wanted)} sentences of kind {kind!r} that the tables are measured "
            "on: they are those of Debian 12 and Python 3.11."
        )
    return [found[digest] for digest in wanted]


def _pinned(kind: str) -> dict[str, None]:
    """Return the digests of the test sentences of a kind, in their order."""
    lines = map(str.split, _PINNED.read_text(encoding="utf-8").splitlines())
    return {digest: None for of, digest in lines if of == kind}


def _digest(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()[:16]


def _all(kind: str) -> list[str]:
    """Return all sentences of a kind in alphabetical order."""
    return sorted({sentence for text in KINDS[kind]() for sentence in _split(text)})


def _docstrings() -> Iterator[str]:
    """Yield the docstrings of Python's standard library, tests left out."""
    library = Path(os.__file__).parent
    for file in sorted(library.rglob("*.py")):
        below = file.relative_to(library).parts[:-1]
        if {"site-packages", "idlelib"} & set(below) or any(part.startswith("test") for part in below):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # samples of what is wrong
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _reference() -> Iterator[str]:
    """Yield the chapters of the language reference that help() shows."""
    from pydoc_data.topics import topics

    yield from topics.values()


def _manuals() -> Iterator[str]:
    """Yield the manuals in the info format."""
    for file in sorted(Path("/usr/share/info").glob("*.gz")):
        yield gzip.decompress(file.read_bytes()).decode("utf-8", "ignore")


def _folders_of_packages() -> Iterator[Path]:
    """Yield the documentation folders of the packages in `packages.txt`, those of the system that the tables are from.

    Other packages of a system would change which sentences are drawn, and with them every table in its last digits.
    """
    names = (Path(__file__).parent / "packages.txt").read_text(encoding="utf-8").split()
    yield from (folder for name in names if (folder := Path("/usr/share/doc") / name).exists())


def _package_notes() -> Iterator[str]:
    """Yield what packages of the system say of themselves: readme files, changes, licences."""
    for file in (file for folder in _folders_of_packages() for file in sorted(folder.rglob("*"))):
        if file.is_file() and file.suffix in ("", ".txt", ".gz") and file.stat().st_size < 2_000_000:
            try:
                raw = file.read_bytes()
                yield (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")
            except (UnicodeDecodeError, gzip.BadGzipFile, EOFError):
                continue


def _licences() -> Iterator[str]:
    """Yield licences: those that packages share, and the copyright file of every package."""
    copyrights = (folder / "copyright" for folder in _folders_of_packages())
    for file in [*sorted(Path("/usr/share/common-licenses").glob("*")), *copyrights]:
        if file.is_file():
            yield file.read_text(encoding="utf-8", errors="ignore")


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "docstrings": _docstrings,
    "reference": _reference,
    "manuals": _manuals,
    "package notes": _package_notes,
    "licences": _licences,
}


def _split(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'`(])", line):
            prose = sum(c.isalpha() or c == " " for c in sentence)
            if 40 <= len(sentence) <= 200 and sentence[0].isupper() and prose > 0.85 * len(sentence):
                yield sentence


@click.command()
@click.option("--write", is_flag=True, help="Draw the test sentences again.")
def main(write: bool) -> None:
    if write:
        lines = [f"{kind} {_digest(sentence)}\n" for kind in TEST_KINDS for sentence in sentences(kind, TESTED)]
        _PINNED.write_text("".join(lines), encoding="utf-8")
    for kind in TEST_KINDS:
        wanted = _pinned(kind).keys()
        print(f"{kind}: {len(wanted & {*map(_digest, _all(kind))})} of {len(wanted)}")


if __name__ == "__main__":
    main()
