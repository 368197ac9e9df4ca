"""TT-matrices fitted on inputs: the best of their rank where that is known, elsewhere nothing left for either core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compressed_folders import relative, tail
from oracles import normal
from tnlib_adapters.compression.methods.factorise import PerWeight, factorise_layer
from tnlib_adapters.compression.methods.matrices import WeightedTTMatrix
from tnlib_adapters.compression.methods.table import METHODS
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes

D, HEADS, N = 12, 3, 400
SIZES = Sizes(n_layers=1, n_heads=HEADS, d_model=D)
ROWS = (3, 4)  # how 12 splits


def weights(dtype: Any = np.float64, scale: float = 1.0) -> Projections:
    """Weights of spectra that decay, and biases."""
    found = {}
    for k, name in enumerate(NAMES):
        u, _, vh = np.linalg.svd(normal((D, D), seed=k))
        found[name] = (scale * (u * 0.8 ** np.arange(D)) @ vh).astype(dtype)
    return Projections(found, {"q": normal((D,), seed=9).astype(dtype)})


def inputs(seed: int = 20) -> np.ndarray:
    """Inputs that lie mostly in a few directions."""
    return normal((N, D), seed=seed) @ (normal((D, D), seed=seed + 1) * 0.7 ** np.arange(D)[:, None])


def fitted(of: Projections, x: np.ndarray) -> PerWeight:
    return fitted_to(of, x.T @ x)


def fitted_to(of: Projections, moments: np.ndarray) -> PerWeight:
    return PerWeight(of, lambda _, weight: WeightedTTMatrix(weight, moments))


def at(method: Any, rank: int) -> dict[str, np.ndarray]:
    return dict(expand(method.matrices([rank - 1] * 4), SIZES).weights)


def apart(weight: np.ndarray) -> np.ndarray:
    """(i1 i2) (j1 j2) -> (i1 j1) (i2 j2)."""
    return weight.reshape(*ROWS, *ROWS).transpose(0, 2, 1, 3).reshape(ROWS[0] ** 2, ROWS[1] ** 2)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_nothing_is_left_for_either_core_alone(rank: int) -> None:
    """With one core as it is, the best other one is a linear least-squares problem, solved here with all inputs."""
    before, x = weights(), inputs()
    found, plain = fitted(before, x), factorise_layer(METHODS["ttm"], before, SIZES)
    for name in NAMES:
        weight = before.weights[name]
        (piece,) = [one for one in found.matrices([rank - 1] * 4) if one.of == name]
        first, second = piece.arrays["core0"][0], piece.arrays["core1"][..., 0]  # i j r, r i j
        wanted = x @ weight
        got = relative(wanted, x @ at(found, rank)[name])
        assert got < 0.8 * relative(wanted, x @ at(plain, rank)[name])
        legs = x.reshape(N, *ROWS)
        by_second = np.einsum("nia,ijr->jnra", legs, first).reshape(ROWS[0], -1, rank * ROWS[1])  # x A, of every j1
        columns = wanted.reshape(N, *ROWS).transpose(1, 0, 2).reshape(-1, ROWS[1])  # (j1 n) j2
        best = columns - (flat := by_second.reshape(-1, rank * ROWS[1])) @ np.linalg.lstsq(flat, columns, rcond=None)[0]
        assert got <= 1.05 * np.linalg.norm(best) / np.linalg.norm(wanted)
        by_first = np.einsum("nia,rab->bnri", legs, second).reshape(-1, rank * ROWS[0])  # x B, of every j2
        columns = wanted.reshape(N, *ROWS).transpose(2, 0, 1).reshape(-1, ROWS[0])  # (j2 n) j1
        best = columns - by_first @ np.linalg.lstsq(by_first, columns, rcond=None)[0]
        assert got <= 1.05 * np.linalg.norm(best) / np.linalg.norm(wanted)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_moments_that_are_a_product_have_a_closed_form(rank: int) -> None:
    """Truncated after R_1 (x) R_2: singular values of the rearranged weight, no TT-matrix of that rank does better."""
    roots = [normal((n, n), seed=30 + n) for n in ROWS]
    root = np.kron(*roots)
    before = weights()
    found = fitted_to(before, root.T @ root)
    for name, weight in at(found, rank).items():
        s = np.linalg.svd(apart(root @ before.weights[name]), compute_uv=False)
        assert relative(root @ before.weights[name], root @ weight) == pytest.approx(tail(s, rank), rel=1e-5)


def test_all_directions_alike_is_the_plain_method() -> None:
    before = weights()
    found, plain = fitted_to(before, 7 * np.eye(D)), factorise_layer(METHODS["ttm"], before, SIZES)
    for name, weight in at(found, 3).items():
        assert relative(at(plain, 3)[name], weight) < 1e-4
    unseen = fitted_to(before, np.zeros((D, D)))
    for name, weight in at(unseen, 3).items():
        assert relative(at(plain, 3)[name], weight) < 1e-4


def test_a_tt_matrix_is_found_again() -> None:
    terms = [(normal((3, 3), seed=k), normal((4, 4), seed=50 + k)) for k in range(2)]
    weight = sum(np.kron(a, b) for a, b in terms)
    found = fitted(Projections(dict.fromkeys(NAMES, weight), {}), inputs())
    assert found.curves[0].errors[1] < 1e-12
    assert relative(weight, at(found, 2)["v"]) < 1e-6


def test_curves_cost_what_is_stored_and_err_what_is_measured() -> None:
    """At ranks in between errors are interpolated, and the fit that follows goes further than the one that measured."""
    before, x = weights(), inputs()
    found = fitted(before, x)
    whole = [len(curve.costs) - 1 for curve in found.curves]
    for block, name in enumerate(NAMES):
        curve = found.curves[block]
        assert (np.diff(curve.costs) > 0).all()
        assert (np.diff(curve.errors) <= 0).all()
        for option in range(whole[block] + 1):
            choice = [*whole[:block], option, *whole[block + 1 :]]
            pieces = found.matrices(choice)
            assert sum(a.size for a in pieces[block].arrays.values()) == curve.costs[option]
            error = relative(x @ before.weights[name], x @ expand(pieces, SIZES).weights[name]) ** 2
            assert error <= 1.3 * curve.errors[option] + 1e-14
    assert found.fixed == D
    for name, weight in expand(found.matrices(whole), SIZES).weights.items():
        np.testing.assert_array_equal(weight, before.weights[name])


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_any_size_of_weights_and_inputs(scale: float) -> None:
    before, x = weights(), inputs()
    small, want = fitted(weights(np.float32, scale), 1e-3 * x), at(fitted(before, x), 2)
    assert {part.dtype for piece in small.matrices([1] * 4) for part in piece.arrays.values()} == {np.dtype(np.float32)}
    for name, weight in at(small, 2).items():
        assert relative(want[name], weight / scale) < 0.05


def test_weights_of_zero_and_inputs_in_a_plane() -> None:
    x = inputs() * (np.arange(D) < 5)
    zero = Projections({name: np.zeros((D, D)) for name in NAMES}, {})
    assert not any(weight.any() for weight in at(fitted(zero, x), 2).values())
    before = weights()
    for name, weight in at(fitted(before, x), 5).items():
        assert np.isfinite(weight).all()
        assert relative(x @ before.weights[name], x @ weight) < 0.1


def test_first_cores_are_isometric_and_rows_of_the_second_orthogonal() -> None:
    for piece in fitted(weights(), inputs()).matrices([3] * 4):
        first, second = piece.arrays["core0"].reshape(-1, 4), piece.arrays["core1"].reshape(4, -1)
        np.testing.assert_allclose(first.T @ first, np.eye(4), atol=1e-12)
        gram = second @ second.T
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-12 * gram[0, 0]
        assert (np.diff(np.diag(gram)) <= 0).all()
