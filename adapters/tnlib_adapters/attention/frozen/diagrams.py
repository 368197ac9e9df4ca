"""Tensor network diagrams of frozen attention: one layer, a product of layers, a sum over paths."""

from __future__ import annotations

from collections.abc import Sequence

from tnlib import KroneckerTerms
from tnlib.drawing.diagram import Diagram, join, text
from tnlib.formats.matrix.diagram import kronecker_terms_diagram

_GAP = 0.75  # space between a sign and its neighbours, beyond the labels of open legs
_MOST = 3  # largest number of layers drawn without ellipsis


def of_frozen(terms: KroneckerTerms) -> Diagram:
    """Return the diagram of the affine map terms x + constant."""
    return _row([terms, "+  constant"], f"{_title(terms)}, and a constant")


def of_product(factors: Sequence[KroneckerTerms], *, constant: bool = False) -> Diagram:
    """Return the diagram of (1 + K_L) ... (1 + K_1); the layer applied first is on the right."""
    parts: list[KroneckerTerms | str] = []
    last = len(factors) - 1
    layers = range(last, -1, -1) if last < _MOST else (last, None, 0)
    for k in layers:
        parts += ["· · ·"] if k is None else ["(  1  +", factors[k], ")"]
    names = "".join(f" (1 + K$_{{{k + 1}}}$)" if k is not None else " ..." for k in layers)
    more = " x + constant" if constant else ""
    return _row([*parts, *(["+  constant"] if constant else [])], f"{len(factors)} layers,{names}{more}")


def of_paths(terms: KroneckerTerms) -> Diagram:
    """Return the diagram of x -> x + terms x + constant, one term per path through at least one head."""
    return _row(["1  +", terms, "+  constant"], f"{terms.ranks[0]} paths and the direct one")


def _row(parts: Sequence[KroneckerTerms | str], title: str) -> Diagram:
    """Return operators and signs side by side as one diagram."""
    placed: list[Diagram] = []
    x = 0.0
    for part in parts:
        if isinstance(part, str):
            half = 0.07 * len(part)
            placed.append(text(part, (x + half, -1.0)))
            x += 2 * half + 0.1
            continue
        diagram = kronecker_terms_diagram(part)
        left, right, low, high = diagram.bounds
        placed.append(diagram.moved(x + _GAP - left, -1.0 - (low + high) / 2))
        x += right - left + 2 * _GAP
    return join(tuple(placed), title)


def _title(terms: KroneckerTerms) -> str:
    return kronecker_terms_diagram(terms).title
