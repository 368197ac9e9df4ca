"""Equations: parts in a row that do not overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tnlib
from tnlib.drawing import Diagram, einsum_diagram, equation


def test_parts_of_an_equation_do_not_overlap() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    tucker, svd = tnlib.tucker(x, ranks=(2, 2, 2)).value, tnlib.svd(x[0]).value
    diagram = equation(einsum_diagram("ijk->ijk", {"x": x}), "=", tucker, "+", svd, title="two")
    assert isinstance(diagram, Diagram)
    assert diagram.title == "two"
    spans, first = [], 0
    for count in (1, 1, 4, 1, 3):
        xs = [node.position[0] for node in diagram.nodes[first : first + count]]
        xs += [leg.end[0] for leg in diagram.legs if leg.end is not None and first <= leg.a < first + count]
        spans.append((min(xs), max(xs)))
        first += count
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_an_empty_diagram_takes_no_height() -> None:
    assert [node.label for node in equation(Diagram((), ()), "=", np.ones(2)).nodes] == ["=", ""]


def test_an_equation_of_signs_alone_is_refused() -> None:
    with pytest.raises(tnlib.ArgumentError, match="at least one value"):
        equation("=", "+")
