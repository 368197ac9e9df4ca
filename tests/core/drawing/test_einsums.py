"""Diagrams of einsums: their open legs are the legs of the result, their nodes the kinds of the tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tnlib
from tnlib.drawing import einsum_diagram


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
    for k, term in enumerate(text.split("->")[0].split(",")):  # a line per leg of every tensor
        assert sum((leg.a == k) + (leg.b == k) for leg in diagram.legs) == len(term)


def test_copy_tensors_join_shared_indices() -> None:
    v, a, b = np.arange(4.0), rng(1).standard_normal((3, 2, 4)), rng(2).standard_normal((4, 2, 5))
    diagram = einsum_diagram("iab,b,baj->ij", {"A": a, "v": v, "B": b}, "i A b B j\n. . v . .")
    kinds = [node.kind for node in diagram.nodes]
    assert kinds == ["tensor", "weights", "tensor", "delta"]
    assert diagram.nodes[3].position[1] == diagram.nodes[0].position[1]
    assert diagram.nodes[1].position[1] < diagram.nodes[0].position[1]


def test_kinds_of_matrices_are_measured() -> None:
    q = np.linalg.qr(rng().standard_normal((6, 3)))[0]
    matrices = {"1": np.eye(3), "d": np.diag([1.0, 2.0]), "u": np.linalg.qr(rng(1).standard_normal((3, 3)))[0], "v": q}
    nodes = {label: einsum_diagram("ij->ij", {label: a}).nodes[0] for label, a in matrices.items()}
    assert [node.kind for node in nodes.values()] == ["text", "weights", "unitary", "isometry"]
    assert nodes["1"].label == ""
    assert nodes["v"].direction is not None
    assert nodes["v"].direction[0] > 0  # its smaller leg is the second, on the right


def test_words_name_legs() -> None:
    diagram = einsum_diagram("query d, key d -> query key", {"Q": (768, 64), "K": (768, 64)})
    assert diagram.open_legs == (("query", 768), ("key", 768))
    assert diagram.bonds == (("d", 64),)


def test_tensors_of_a_layout_have_distinct_positions() -> None:
    names = dict(zip("ABCVWX", [(2, 3), (3, 2, 3), (3, 2), (2, 3), (3, 2, 3), (3, 2)], strict=True))
    diagram = einsum_diagram("ij,jkl,lm,in,nko,om->", names, "A B C\nV W X")
    positions = [node.position for node in diagram.nodes]
    assert len(set(positions)) == len(positions) == 6


def test_a_label_may_equal_an_index_or_another_label() -> None:
    diagram = einsum_diagram("ij,j->i", {"i": (2, 3), "j": (3,)})
    assert len({node.position for node in diagram.nodes}) == 2
    assert diagram.open_legs == (("i", 2),)
    twice = einsum_diagram("ij,jk->ik", {"W": (2, 3), "W ": (3, 2)}, "W W")
    assert [node.label for node in twice.nodes] == ["W", "W"]
    assert len({node.position for node in twice.nodes}) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
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
def test_refusals(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(tnlib.ArgumentError, match=words):
        einsum_diagram(*arguments)  # type: ignore[arg-type]
