"""Diagrams of einsums have the legs of the result, and equations what stands on both of their sides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tnlib
from tnlib.drawing import Diagram, einsum_diagram, equation


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, dict[str, np.ndarray]]:
    letters = "ijkl"
    sizes = {i: draw(st.integers(1, 4), label=i) for i in letters}
    terms = draw(st.lists(st.text(letters, min_size=1, max_size=3), min_size=1, max_size=4))
    used = sorted({i for term in terms for i in term})
    result = "".join(draw(st.permutations(draw(st.lists(st.sampled_from(used), unique=True)))))
    arrays = {f"T{k}": rng(k).standard_normal([sizes[i] for i in term]) for k, term in enumerate(terms)}
    return f"{','.join(terms)}->{result}", arrays


@settings(max_examples=60, deadline=None)
@given(einsums())
def test_open_legs_are_those_of_the_result(case: tuple[str, dict[str, np.ndarray]]) -> None:
    text, arrays = case
    diagram = einsum_diagram(text, arrays)
    value = np.einsum(text, *arrays.values())
    assert diagram.open_legs == tuple(zip(text.split("->")[1], value.shape, strict=True))
    lines = {frozenset((leg.a, leg.b)) for leg in diagram.legs}
    for k, term in enumerate(text.split("->")[0].split(",")):  # every tensor has as many lines as legs, and no more
        ends = sum((leg.a == k) + (leg.b == k) for leg in diagram.legs)
        assert ends == len(term)
    assert len(lines) <= len(diagram.legs)


def test_copy_tensors_stand_where_an_index_is_shared() -> None:
    v, a, b = np.arange(4.0), rng(1).standard_normal((3, 2, 4)), rng(2).standard_normal((4, 2, 5))
    diagram = einsum_diagram("iab,b,baj->ij", {"A": a, "v": v, "B": b}, "i A b B j\n. . v . .")
    kinds = [node.kind for node in diagram.nodes]
    assert kinds == ["tensor", "weights", "tensor", "delta"]
    assert diagram.nodes[3].position[1] == diagram.nodes[0].position[1]
    assert diagram.nodes[1].position[1] < diagram.nodes[0].position[1]


def test_what_a_matrix_is_is_measured() -> None:
    q = np.linalg.qr(rng().standard_normal((6, 3)))[0]
    kinds = {"1": np.eye(3), "d": np.diag([1.0, 2.0]), "u": np.linalg.qr(rng(1).standard_normal((3, 3)))[0], "v": q}
    found = {label: einsum_diagram("ij->ij", {label: a}).nodes[0] for label, a in kinds.items()}
    assert [node.kind for node in found.values()] == ["text", "weights", "unitary", "isometry"]
    assert found["1"].label == ""
    assert found["v"].direction is not None
    assert found["v"].direction[0] > 0  # its small leg is the second, on the right


def test_words_name_legs() -> None:
    diagram = einsum_diagram("query d, key d -> query key", {"Q": (768, 64), "K": (768, 64)})
    assert diagram.open_legs == (("query", 768), ("key", 768))
    assert diagram.bonds == (("d", 64),)


def test_no_two_shapes_stand_on_one_place() -> None:
    names = dict(zip("ABCVWX", [(2, 3), (3, 2, 3), (3, 2), (2, 3), (3, 2, 3), (3, 2)], strict=True))
    diagram = einsum_diagram("ij,jkl,lm,in,nko,om->", names, "A B C\nV W X")
    places = [node.position for node in diagram.nodes]
    assert len(set(places)) == len(places) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ij,j", {"A": (2, 3), "v": (3,)}), "one '->'"),
        (("ij,j->i", {"A": (2, 3)}), "each of the 2 terms"),
        (("ij,j->i", {"A": (2, 3), "v": (4,)}), "index j must have one size"),
        (("ij,j->i", {"A": (2, 3), "v": (3, 1)}), "v must have one leg,"),
        (("ij,j->k", {"A": (2, 3), "v": (3,)}), "indices of the result"),
        (("ij,j->ii", {"A": (2, 3), "v": (3,)}), "every index once"),
        (("ij,j->i", {"A": (2, 3), "v": (3,)}, "A"), "a place for every tensor, got none for v"),
    ],
)
def test_refusals(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(tnlib.ArgumentError, match=said):
        einsum_diagram(*arguments)  # type: ignore[arg-type]


def test_parts_of_an_equation_do_not_overlap() -> None:
    x = rng().standard_normal((3, 4, 5))
    parts = [
        einsum_diagram("ijk->ijk", {"x": x}),
        "=",
        tnlib.tucker(x, ranks=(2, 2, 2)).value,
        "+",
        tnlib.svd(x[0]).value,
    ]
    whole = equation(*parts, title="two")
    assert isinstance(whole, Diagram)
    assert whole.title == "two"
    counts = [1, 1, 4, 1, 3]
    spans, first = [], 0
    for count in counts:
        xs = [node.position[0] for node in whole.nodes[first : first + count]]
        xs += [leg.end[0] for leg in whole.legs if leg.end is not None and first <= leg.a < first + count]
        spans.append((min(xs), max(xs)))
        first += count
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_an_equation_of_signs_alone_is_refused() -> None:
    with pytest.raises(tnlib.ArgumentError, match="at least one value"):
        equation("=", "+")
