"""Values of diagrams: every diagram of a format, network or einsum contracts to what it stands for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import quimb.tensor as qtn

import tnlib
from tnlib.drawing import Bubble, Diagram, Leg, Node, einsum_diagram, sweep_steps

RANDOM = np.random.default_rng(0).standard_normal
X = RANDOM((3, 4, 5))
TRAIN = tnlib.canonicalize(tnlib.tt_svd(RANDOM((2, 3, 1, 4, 2))).value, 2)
OPERATOR = tnlib.ttm_svd(RANDOM((12, 10)), (3, 4), (2, 5)).value


def numbered(arrays: Any) -> dict[str, np.ndarray]:
    return {str(k): a for k, a in enumerate(arrays)}


def factored(terms: tnlib.KroneckerTerms) -> dict[str, np.ndarray]:
    """Factors of the right matrices as two arrays, with zeros up to the largest rank."""
    rank = max(term.ranks[0] for term in terms.right)
    left = [np.pad(term.left, ((0, 0), (0, rank - term.ranks[0]))) for term in terms.right]
    right = [np.pad(term.right, ((0, rank - term.ranks[0]), (0, 0))) for term in terms.right]
    return {"A": terms.left, "left": np.stack(left), "right": np.stack(right)}


def of_svd(t: Any) -> tuple[Any, dict[str, np.ndarray]]:
    return t, {"U": t.u, "s": t.s, "V$^H$": t.vh}


def of_vidal(t: Any) -> tuple[Any, dict[str, np.ndarray]]:
    gammas = {f"$\\Gamma_{{{k}}}$": a for k, a in enumerate(t.gammas)}
    return t, gammas | {f"$\\Lambda_{{{k + 1}}}$": a for k, a in enumerate(t.lambdas)}


def of_terms(ranks: tuple[int, ...] | None) -> tuple[Any, dict[str, np.ndarray]]:
    left = RANDOM((3, 4, 2))
    if ranks is None:
        terms = tnlib.KroneckerTerms(left, list(RANDOM((3, 5, 6))))
        return terms, {"A": left, "B": np.stack([np.asarray(b) for b in terms.right])}
    terms = tnlib.KroneckerTerms(left, [tnlib.LowRank(RANDOM((5, r)), RANDOM((r, 6))) for r in ranks])
    return terms, factored(terms)


def lettered(factors: Any) -> dict[str, np.ndarray]:
    return dict(zip("ABC", factors, strict=True))


def of_tucker(t: Any) -> tuple[Any, dict[str, np.ndarray]]:
    return t, lettered(t.factors) | {"core": t.core}


def of_cp(t: Any) -> tuple[Any, dict[str, np.ndarray]]:
    return t, lettered(t.factors) | {"w": t.weights}


FORMATS: dict[str, Any] = {
    "array": lambda: (X, {0: X}),
    "svd": lambda: of_svd(tnlib.svd(X.reshape(3, 20)).value),
    "svd of a tensor": lambda: of_svd(tnlib.svd(X, left=(0, 2)).value),
    "low rank": lambda: (t := tnlib.LowRank(RANDOM((4, 2)), RANDOM((2, 3))), {"left": t.left, "right": t.right}),
    "train": lambda: (TRAIN, numbered(TRAIN.cores)),
    "operator": lambda: (OPERATOR, numbered(OPERATOR.cores)),
    "vidal": lambda: of_vidal(tnlib.vidal(TRAIN)),
    "tucker": lambda: of_tucker(tnlib.tucker(X, ranks=(2, 3, 4)).value),
    "cp": lambda: of_cp(tnlib.CP(RANDOM(2), [RANDOM((n, 2)) for n in X.shape])),
    "kronecker terms": lambda: of_terms(None),
    "kronecker terms of low rank": lambda: of_terms((2, 3, 1)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_diagram_of_a_format_is_the_tensor(name: str) -> None:
    value, arrays = FORMATS[name]()
    diagram = tnlib.draw(value).diagram
    names = [name for name, _ in diagram.open_legs]
    rows, columns = (sorted(n for n in names if n[0] == letter) for letter in "kb")
    found = diagram.evaluate(arrays).transpose([names.index(n) for n in [*rows, *columns]])
    found = found * np.exp(getattr(value, "log_scale", 0.0))  # as the title says
    wanted = np.asarray(value.full() if hasattr(value, "full") else value)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-12, atol=1e-12)


EINSUMS = {
    "ij,j->i": [(3, 4), (4,)],
    "ij,ji->": [(3, 4), (4, 3)],
    "ii->": [(4, 4)],
    "iab,jbc,kcd,ijk->da": [(2, 3, 4), (3, 4, 2), (2, 2, 3), (2, 3, 2)],
    "ij,jk,j->kji": [(3, 4), (4, 2), (4,)],  # an index of three tensors and of the result
    "ij,k->i": [(3, 4), (2,)],  # indices that are summed over
    "ij,kl->ikjl": [(2, 2), (3, 3)],
    "i,i->i": [(5,), (5,)],
}


@pytest.mark.parametrize("text", EINSUMS)
def test_the_diagram_of_an_einsum_is_its_result(text: str) -> None:
    arrays = {f"T{k}": RANDOM(shape) for k, shape in enumerate(EINSUMS[text])}
    found = einsum_diagram(text, arrays).evaluate(arrays)
    np.testing.assert_allclose(found, np.einsum(text, *arrays.values()), rtol=1e-12, atol=1e-12)


def test_copy_tensors_and_lines_need_no_array() -> None:
    copies = {f"delta{n}": qtn.COPY_tensor(4, "ijklm"[:n]).data for n in (3, 4)}
    arrays = {"v": RANDOM(4), "1": np.eye(4), **copies}
    text = "v,vij,jabc,ck->ikba"
    operands = {name: arrays[name] for name in ("v", "delta3", "delta4", "1")}
    found = einsum_diagram(text, operands).evaluate({"v": arrays["v"]})
    np.testing.assert_allclose(found, np.einsum(text, *operands.values()), rtol=1e-12)


def test_networks_of_quimb() -> None:
    for network in (qtn.PEPS.rand(2, 3, bond_dim=2, seed=0), tnlib.interop.quimb.to_network(TRAIN)):
        diagram = tnlib.draw(network).diagram
        found = diagram.evaluate({k: tensor.data for k, tensor in enumerate(network.tensors)})
        wanted = network.contract(output_inds=[name for name, _ in diagram.open_legs]).data
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


def test_every_step_of_a_sweep_is_the_tensor() -> None:
    x = RANDOM((2, 3, 4, 2))
    cores = tnlib.tt_svd(x).value.cores
    for step in sweep_steps(tnlib.tt_svd(x).value).values():
        k = len(step.nodes) - 1
        rest = cores[k]
        for core in cores[k + 1 :]:
            rest = np.tensordot(rest, core, axes=1)
        found = step.evaluate({**numbered(cores), k: rest})
        np.testing.assert_allclose(found, x, rtol=1e-12, atol=1e-12)


def node(label: str, x: float, kind: str = "tensor") -> Node:
    return Node(kind, label, (x, 0.0))


def test_bubbles_are_contracted_first_and_nested_ones_before() -> None:
    nodes = (node("A", 0), node("B", 1), node("v", 2))
    legs = (Leg(0, None, "i", 2, (-1, 0)), Leg(0, 1, "j", 3), Leg(1, 2, "k", 4))
    diagram = Diagram(nodes, legs, "", (Bubble((0, 1, 2), "tanh"), Bubble((1, 2), "exp")))
    A, B, v = RANDOM((2, 3)), RANDOM((3, 4)), RANDOM(4)
    found = diagram.evaluate({"A": A, "B": B, "v": v, "tanh": np.tanh, "exp": np.exp})
    np.testing.assert_allclose(found, np.tanh(A @ np.exp(B @ v)), rtol=1e-12)


def test_functions_copies_and_sums() -> None:
    """x + tanh(x W) + b, for x (n, 3)."""
    nodes = (node("x", 0), node("", 1, "function"), node("W", 2), node("tanh", 3, "function"), node("b", 4))
    nodes = (*nodes, node("+", 5, "function"))
    ends = {"n": (6.0, 0.0), "out": (6.0, -1.0)}
    legs = [Leg(0, 1, "n"), Leg(0, 1, "stream", 3), Leg(1, 5, "n"), Leg(1, 5, "stream", 3), Leg(1, 3, "n")]
    legs += [Leg(1, 2, "stream", 3), Leg(2, 3, "wide", 3), Leg(3, 5, "n"), Leg(3, 5, "wide", 3), Leg(4, 5, "", 3)]
    legs += [Leg(5, None, "n", None, ends["n"]), Leg(5, None, "out", 3, ends["out"])]
    x, W, b = RANDOM((4, 3)), RANDOM((3, 3)), RANDOM(3)
    diagram = Diagram(nodes, tuple(legs))
    found = diagram.evaluate({"x": x, "W": W, "b": b, "tanh": np.tanh})
    np.testing.assert_allclose(found, x + np.tanh(x @ W) + b, rtol=1e-12)
    svg = tnlib.draw(diagram)._repr_svg_()
    assert svg.rstrip().endswith("</svg>")


def test_many_legs() -> None:
    train = tnlib.random.tensor_train([1] * 29 + [3], 2, rng=np.random.default_rng(0))
    found = tnlib.draw(train).diagram.evaluate(numbered(train.cores))
    np.testing.assert_allclose(found * np.exp(train.log_scale), train.full(), rtol=1e-12)


BONE = (Leg(0, 1, "j", 3), Leg(0, None, "i", 2, (-1, 0)))
PAIR = Diagram((node("A", 0), node("v", 1)), BONE)
REFUSED = {
    "an array is missing": (PAIR, {"A": np.ones((3, 2))}, "none for 'v'"),
    "another number of axes": (
        PAIR,
        {"A": np.ones(3), "v": np.ones(3)},
        r"axis per leg, sizes \[3, 2\], got shape \(3,\)",
    ),
    "another size": (PAIR, {"A": np.ones((3, 2)), "v": np.ones(4)}, "leg 'j' must have one size, got 3 and 4"),
    "no numbers": (PAIR, {"A": "A", "v": np.ones(3)}, "A must be"),
    "a sign": (Diagram((*PAIR.nodes, node("=", 2, "text")), BONE), {}, "got the sign '='"),
    "an ellipsis": (Diagram((*PAIR.nodes, node("", 2, "ellipsis")), BONE), {}, "must be one network"),
    "no function": (Diagram(PAIR.nodes, BONE, "", (Bubble((1,), "f"),)), {"A": np.ones((3, 2)), "v": [1] * 3}, "'f'"),
    "no dict": (PAIR, [1], "values must be a dict from labels, got list"),
    "no callable": (
        Diagram(PAIR.nodes, BONE, "", (Bubble((1,), "f"),)),
        {"A": np.ones((3, 2)), "v": [1] * 3, "f": 2},
        "f must be a function of an array, got int",
    ),
    "a function without input": (Diagram((node("f", 0, "function"),), ()), {"f": np.tanh}, "what runs into f"),
    "a function with too few axes": (
        Diagram((node("v", 0), node("f", 1, "function")), (Leg(0, 1), Leg(1, None, "i", 2, (2, 0)))),
        {"v": np.ones(2), "f": lambda x: np.outer(x, x)},
        "f must return an axis per leg, got 2 for 1 legs",
    ),
    "a function before its input": (
        Diagram((node("f", 0, "function"), node("", 1, "function"), node("v", 2)), (Leg(2, 1), Leg(1, 0))),
        {"v": np.ones(2), "f": np.tanh},
        "must come from nodes before it",
    ),
    "two functions of one tensor": (
        Diagram((node("f", 0, "function"), node("A", 1)), (Leg(1, 0), Leg(1, None, "i", 2, (2, 0)))),
        {"A": np.ones((2, 2)), "f": np.tanh},
        "run nowhere else",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    diagram, values, words = REFUSED[case]
    with pytest.raises(tnlib.TnlibError, match=words):
        diagram.evaluate(values)


def test_a_copy_tensor_has_one_size() -> None:
    nodes = (node("A", 0), node("", 1, "delta"), node("B", 2))
    for sizes in itertools.permutations((64, 65)):
        with pytest.raises(tnlib.ArgumentError, match="one size"):
            Diagram(nodes, (Leg(0, 1, "", sizes[0]), Leg(1, 2, "", sizes[1])))
