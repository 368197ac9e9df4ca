"""What the options of a method leave out of the ordinary: zeros, single precision, heads that vanish."""

from __future__ import annotations

import numpy as np
import pytest
from compressed_folders import Dense
from oracles import normal
from tnlib_adapters.compression.methods.factorise import factorise_layer
from tnlib_adapters.compression.methods.table import METHODS
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes

D, HEADS = 12, 3
SIZES = Sizes(n_layers=1, n_heads=HEADS, d_model=D)
each_method = pytest.mark.parametrize("method", METHODS)


def projections(biases: str = "qkvo", dtype: str = "float64") -> Projections:
    """Weights of different sizes, none of them flat in its spectrum: every option differs clearly from the next."""
    decay = np.diag(0.8 ** np.arange(D))
    weights = {n: (k + 1) * normal((D, D), seed=k) @ decay @ normal((D, D), seed=k + 4) for k, n in enumerate(NAMES)}
    return Projections(
        {name: weight.astype(dtype) for name, weight in weights.items()},
        {name: normal((D,), dtype, seed=ord(name)) for name in biases},
    )


def dense(some: Projections) -> Dense:
    return Dense(
        {name: weight.astype(float) for name, weight in some.weights.items()},
        {name: bias.astype(float) for name, bias in some.biases.items()},
        HEADS,
    )


def blocks(method: str, layer: Dense) -> list[np.ndarray]:
    """What each curve of a method is about."""
    if method == "heads":
        qk, ov = layer.operators()
        return [*qk, *ov]
    return [layer.weights[name] for name in NAMES] if method in ("matrix", "ttm") else [layer.stack()]


def true_errors(method: str, some: Projections, pieces: list[FactoredMatrix]) -> np.ndarray:
    found = expand(pieces, SIZES)
    after = dense(Projections({**some.weights, **found.weights}, {**some.biases, **found.biases}))
    pairs = zip(blocks(method, dense(some)), blocks(method, after), strict=True)
    return np.array([np.sum((a - b) ** 2) / np.sum(a**2) for a, b in pairs])


@pytest.mark.parametrize("biases", ["qkvo", "qko", ""])
@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker"])
def test_errors_in_single_precision(method: str, biases: str) -> None:
    """As in double precision, up to the roundoff of the factors."""
    some = projections(biases, "float32")
    found = factorise_layer(METHODS[method], some, SIZES)
    for step in range(max(len(curve.costs) for curve in found.curves)):
        choice = [(step + b) % len(curve.costs) for b, curve in enumerate(found.curves)]
        said = [float(curve.errors[k]) for k, curve in zip(choice, found.curves, strict=True)]
        np.testing.assert_allclose(said, true_errors(method, some, found.matrices(choice)), rtol=0, atol=1e-6)


@each_method
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_factors_have_the_dtype_of_the_weights_at_every_option(method: str, dtype: str) -> None:
    found = factorise_layer(METHODS[method], projections(dtype=dtype), SIZES)
    for choice in ([0] * len(found.curves), [1] * len(found.curves), [len(c.costs) - 1 for c in found.curves]):
        assert {a.dtype for piece in found.matrices(choice) for a in piece.arrays.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker"])
def test_what_is_zero_errs_nowhere(method: str) -> None:
    """So that no block that needs nothing is given numbers which another one needs."""
    some = projections(biases="")
    names = NAMES if method == "tucker" else ("v",)
    some = Projections({**some.weights, **{name: np.zeros((D, D)) for name in names}}, {})
    curves = factorise_layer(METHODS[method], some, SIZES).curves
    zero = {"heads": slice(HEADS, None), "matrix": slice(2, 3), "ttm": slice(2, 3), "tucker": slice(None)}[method]
    assert curves[zero]
    for curve in curves[zero]:
        np.testing.assert_array_equal(curve.errors, 0)
