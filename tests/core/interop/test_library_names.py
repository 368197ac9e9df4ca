"""The table of names on the page of physics: every name of an installed library exists there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tnlib

PAGE = Path(__file__).resolve().parents[3] / "docs" / "physics.md"
KEYWORDS = ("cap on bonds", "tolerance")


def rows() -> dict[str, dict[str, list[str]]]:
    """Concept -> library -> the names in its cell, without arguments."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| | tnlib |") :].split("\n\n")[0].splitlines()
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    cells = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}
    return {
        concept: {name: re.findall(r"`(\w[\w.]*)(?:\([^`]*\))?`", cell) for name, cell in of_concept.items()}
        for concept, of_concept in cells.items()
    }


def has(places: list[object], name: str) -> bool:
    for part in places:
        for step in name.split("."):
            part = getattr(part, step, None)
        if part is not None:
            return True
    return False


@pytest.mark.parametrize("library", ["tnlib", "quimb", "TeNPy", "tensorly"])
def test_every_name_exists(library: str) -> None:
    places: list[object] = [tnlib, tnlib.TensorTrain]
    if library == "quimb":
        qtn = pytest.importorskip("quimb.tensor")
        places = [qtn, qtn.MatrixProductState, qtn.MatrixProductOperator]
    if library == "TeNPy":
        mps, mpo, site = (pytest.importorskip(f"tenpy.networks.{name}") for name in ("mps", "mpo", "site"))
        places = [mps, mps.MPS, mpo, mpo.MPO, site]
    if library == "tensorly":
        names = ("", ".decomposition", ".random", ".tt_tensor", ".tt_matrix", ".contrib.decomposition")
        places = [pytest.importorskip(f"tensorly{name}") for name in names]
    named = [name for concept, row in rows().items() if concept not in KEYWORDS for name in row[library]]
    assert len(named) >= 5
    assert [name for name in named if not has(places, name)] == []
