"""Attention-only models with fixed patterns as one operator, as a sum over paths, and as diagrams."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
from oracles import assert_close, normal, refused
from tnlib_adapters import (
    FrozenAttention,
    FrozenPaths,
    FrozenStack,
    ResidualProduct,
    builtin_path,
    freeze,
    open_checkpoint,
)
from tnlib_adapters.reference.model import Forward, run

import tnlib
from tnlib.drawing import Diagram

Stack = tuple[FrozenStack, Forward]


@pytest.fixture(scope="module")
def trained() -> Stack:
    """The built-in model on a repeated segment, under its own patterns."""
    model = open_checkpoint(builtin_path())
    segment = np.random.default_rng(0).integers(0, 128, size=7)
    seen = run(model, np.concatenate([segment, segment]))
    return freeze(model, [of_layer[0] for of_layer in seen.patterns]), seen


def small(n_layers: int = 3, n: int = 4, d: int = 6, heads: int = 2, seed: int = 0) -> FrozenStack:
    layers = []
    for layer in range(n_layers):
        a, l, r, c = (
            normal(shape, seed=seed + 10 * layer + i) / 2
            for i, shape in enumerate([(heads, n, n), (heads, d, 2), (heads, 2, d), (n, d)])
        )
        right = [tnlib.LowRank(x, y) for x, y in zip(l, r, strict=True)]
        layers.append(FrozenAttention(tnlib.KroneckerTerms(a, right), c))
    return FrozenStack(layers)


# ------------------------------------------------------------------------------------------------- the whole model


def test_the_stack_is_the_model(trained: Stack) -> None:
    stack, seen = trained
    x, want = seen.residuals[0][0], seen.residuals[-1][0]
    operator, constant = stack
    for got in (stack.apply(x), operator.apply(x) + constant, stack.expand().apply(x)):
        assert np.linalg.norm(got - want) <= 1e-10 * np.linalg.norm(want)


def test_every_path_is_a_list_of_heads_and_its_operator(trained: Stack) -> None:
    stack, seen = trained
    model = open_checkpoint(builtin_path())
    found = stack.expand()
    heads = [None, 0, 1, 2, 3]
    assert sorted(found.paths) == sorted(
        tuple((layer, head) for layer, head in enumerate(pair) if head is not None)
        for pair in itertools.product(heads, heads)
        if pair != (None, None)
    )
    w = [[np.asarray(model.attention(layer).ov(h))[:-1, :-1] for h in range(4)] for layer in range(2)]
    at = found.paths.index(((0, 2), (1, 3)))
    want = seen.patterns[1][0, 3] @ seen.patterns[0][0, 2]
    assert_close(found.terms.left[at], want)
    assert_close(np.asarray(found.terms.right[at]), (w[0][2] @ w[1][3]).T, np.float32)
    assert all(isinstance(term, tnlib.LowRank) and term.ranks == (16,) for term in found.terms.right)


# ---------------------------------------------------------------------------------------------------------- the form


@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_the_product_of_its_factors(n_layers: int) -> None:
    stack = small(n_layers)
    dense = np.eye(24)
    for layer in stack.layers:
        dense = (np.eye(24) + layer.terms.full()) @ dense
    operator, constant = stack
    assert_close(operator.full(), dense, factor=500)
    assert_close(operator.H.full(), dense.T, factor=500)
    assert_close(operator.terms().full(), dense, factor=500)
    assert operator.norm() == pytest.approx(np.linalg.norm(dense))
    assert operator.shape == (24, 24)
    assert operator.ranks == (2,) * n_layers
    x = normal((24, 3))
    assert_close(operator @ x, dense @ x, factor=500)
    assert_close(x.T @ operator, x.T @ dense, factor=500)
    found = scipy.sparse.linalg.svds(scipy.sparse.linalg.aslinearoperator(operator), 1, return_singular_vectors=False)
    assert found[0] == pytest.approx(np.linalg.norm(dense, 2))
    assert_close(stack.apply(np.zeros((4, 6))), constant)


def test_the_constant_is_carried_through_the_layers_above() -> None:
    stack = small(3)
    x, want = normal((4, 6), seed=77), None
    want = x
    for layer in stack.layers:
        want = want + layer.terms.apply(want) + layer.constant
    assert_close(stack.apply(x), want, factor=500)
    assert_close(stack.expand().apply(x), want, factor=500)


def test_stacks_on_top_of_each_other() -> None:
    one, two = small(1), small(2, seed=100)
    both, x = two @ one, normal((4, 6), seed=5)
    assert isinstance(both, FrozenStack)
    assert_close(both.apply(x), two.apply(one.apply(x)), factor=500)
    product = two.operator @ one.operator
    assert isinstance(product, ResidualProduct)
    assert_close(product.full(), two.operator.full() @ one.operator.full(), factor=500)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_paths_up_to_an_order(order: int) -> None:
    stack = small(3)
    everything, some = stack.expand(), stack.expand(max_order=order)
    kept = [i for i, path in enumerate(everything.paths) if len(path) <= order]
    assert sorted(some.paths) == sorted(everything.paths[i] for i in kept)
    want = sum(np.kron(everything.terms.left[i], np.asarray(everything.terms.right[i])) for i in kept)
    assert_close(some.terms.full(), want, factor=500)
    assert max(map(len, some.paths)) == min(order, 3)


def test_twelve_layers_of_twelve_heads_stay_a_product() -> None:
    """13^12 paths would be 2 * 10^13; the stack is applied in 144 two-sided products."""
    stack = small(12, n=16, d=32, heads=12)
    assert stack.apply(normal((16, 32))).shape == (16, 32)
    with refused(ValueError, "FrozenStack.expand", "23,298,085,122,480 paths", "max_order"):
        stack.expand()
    assert len(stack.expand(max_order=2).paths) == 144 + 66 * 144
    with refused(ValueError, "FrozenStack.expand", "max_order must be at least 1"):
        stack.expand(max_order=0)


def test_what_is_printed(trained: Stack) -> None:
    stack, _ = trained
    assert repr(stack) == "FrozenStack(layers of 4, 4 heads on 14 positions x 64 features)"
    assert repr(stack.expand()) == "FrozenPaths(24 paths of at most 2 heads on 14 positions x 64 features)"
    assert isinstance(stack.expand(), FrozenPaths)


# ---------------------------------------------------------------------------------------------------------- bad input


def patterns(n: int = 5, heads: int = 4) -> np.ndarray:
    return np.full((heads, n, n), 1 / n)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([patterns()], ["one array per layer, 2", "got 1"]),
        ([patterns(), patterns(heads=3)], ["layer 1", "(4, 5, 5)", "got (3, 5, 5)"]),
        ([patterns(), patterns(6)], ["layer 1", "(4, 5, 5)", "got (4, 6, 6)"]),
        ([patterns()[:, :4], patterns()], ["layer 0", "(4, 5, 5)", "got (4, 4, 5)"]),
        ([patterns(), 2 * patterns()], ["layer 1", "sum to one", "got 2 in row 0 of head 0", "softmax"]),
        ([patterns(), patterns() * np.nan], ["layer 1 must be finite"]),
        ([np.tril(np.ones((4, 5, 5))) / np.arange(5, 0, -1)] * 2, ["layer 0", "sum to one"]),  # over the wrong leg
    ],
)
def test_patterns_that_do_not_fit_are_refused(given: list[np.ndarray], words: list[str]) -> None:
    with refused(ValueError, "freeze: patterns", *words):
        freeze(open_checkpoint(builtin_path()), given)


def test_models_with_norms_are_refused(saved: Any) -> None:
    with refused(ValueError, "freeze: checkpoint", "attention-only", "gpt2", "not linear"):
        freeze(open_checkpoint(saved("gpt2")[1]), [patterns()] * 3)


def test_layers_that_do_not_fit_are_refused() -> None:
    with refused(ValueError, "ResidualProduct: factor 1", "(4, 6)", "(5, 6)"):
        FrozenStack([*small(1).layers, *small(1, n=5).layers])
    with refused(TypeError, "ResidualProduct: factors", "at least one"):
        FrozenStack([])
    for layers in (None, np.eye(3), [np.eye(3)], "a"):
        with refused(TypeError, "FrozenStack: layers must be a list of FrozenAttention, got"):
            FrozenStack(layers)  # type: ignore[arg-type]
    for patterns_ in (3.0, "ab"):
        with refused(ValueError, "freeze: patterns must be one array per layer, 2, got"):
            freeze(open_checkpoint(builtin_path()), patterns=patterns_)  # type: ignore[call-overload]
    with refused(TypeError, "ResidualProduct: factors", "NoneType"):
        ResidualProduct(None)  # type: ignore[arg-type]
    with refused(TypeError, "ResidualProduct: factors", "ndarray"):
        ResidualProduct([np.eye(3)])


POSITIONS, WIDTH = 14, 64
X = normal((POSITIONS, WIDTH), seed=1)


@pytest.fixture
def stack(trained: Stack) -> FrozenStack:
    return trained[0]


def drawn(value: Any) -> Diagram:
    diagram = tnlib.draw(value).diagram
    assert diagram.open_legs == (("position", POSITIONS), ("stream", WIDTH))
    return diagram


def values_of(layers: Any, constant: Any = None) -> dict[str, Any]:
    """The arrays of layers by label, numbered from 1 if there are several."""
    values: dict[str, Any] = {"x": X, "c": constant}
    for k, terms in enumerate(layers, 1):
        mark = f"$_{{{k}}}$" if len(layers) > 1 else ""
        values[f"A{mark}"] = terms.left
        values[f"left{mark}"] = np.stack([term.left for term in terms.right])
        values[f"right{mark}"] = np.stack([term.right for term in terms.right])
    return values


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * np.abs(wanted).max())


def test_a_layer(stack: Any) -> None:
    layer = stack.layers[0]
    diagram = drawn(layer)
    assert ("term", 4) in diagram.bonds
    close(diagram.evaluate(values_of([layer.terms], layer.constant)), layer.apply(X))


def test_paths(stack: Any) -> None:
    paths = stack.expand()
    diagram = drawn(paths)
    assert ("term", 24) in diagram.bonds
    assert "24 paths" in diagram.title
    terms = [tnlib.LowRank(t.left, t.right) for t in paths.terms.right]
    rank = max(t.ranks[0] for t in terms)
    values = {
        "A": paths.terms.left,
        "left": np.stack([np.pad(t.left, ((0, 0), (0, rank - t.ranks[0]))) for t in terms]),
        "right": np.stack([np.pad(t.right, ((0, rank - t.ranks[0]), (0, 0))) for t in terms]),
    }
    close(diagram.evaluate({"x": X, "c": paths.constant, **values}), stack.apply(X))


def test_a_stack_is_a_product_of_its_layers(stack: Any) -> None:
    layers = [layer.terms for layer in stack.layers]
    whole, linear = drawn(stack), drawn(stack.operator)
    close(linear.evaluate(values_of(layers)), stack.operator.apply(X))
    constant = stack.apply(np.zeros_like(X))
    close(whole.evaluate(values_of(layers, constant)), stack.apply(X))
    assert "2 layers" in whole.title


def test_of_many_layers_those_between_are_one_function(stack: Any) -> None:
    tall = stack @ stack
    layers = [layer.terms for layer in tall.layers]
    diagram = drawn(tall.operator)
    assert [node.label for node in diagram.nodes if "layers" in node.label] == ["layers 2 to 3"]
    assert "(1 + K$_{4}$) ... (1 + K$_{1}$) x" in diagram.title

    def middle(x: Any) -> Any:
        for terms in layers[1:3]:
            x = x + terms.apply(x)
        return x

    close(diagram.evaluate({**values_of(layers), "layers 2 to 3": middle}), tall.operator.apply(X))


def test_no_texts_overlap(stack: Any) -> None:
    axes = tnlib.draw(stack).figure.axes[0]
    back = axes.transData.inverted()
    boxes = [(text.get_text(), *back.transform(text.get_window_extent().get_points())) for text in axes.texts]
    for k, (one, (x0, y0), (x1, y1)) in enumerate(boxes):
        for other, (u0, v0), (u1, v1) in boxes[:k]:
            assert x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0, f"{one} on {other}"
