"""The spectral radius reduction: fitness by its definition, known cases, and several maxima."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles import normal, refused
from tnlib_adapters.circuits import SpectralReduction, spectral_reduction

import tnlib


def radius(a: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(a)).max())


def fitness(t: np.ndarray, variables: str, reduction: SpectralReduction, start: int) -> float:
    """The definition, entry by entry of the tensor."""
    letters = list(dict.fromkeys(variables))
    matrices = dict(zip(letters, reduction.matrices[start], strict=True))
    d = reduction.matrices[start][0].shape[-1]
    p = np.zeros((d, d), complex)
    for index in itertools.product(*map(range, t.shape)):
        term = np.eye(d)
        for letter, i in zip(variables, index, strict=True):
            term = term @ matrices[letter][i]
        p += t[index] * term
    size = sum(np.kron(x, x.conj()) for m in matrices.values() for x in m)
    return radius(p) ** (1 / t.ndim) / radius(size) ** 0.5


CASES = [
    ("aaa", (3, 3, 3)),
    ("abb", (2, 3, 3)),
    ("aba", (3, 2, 3)),
    ("abc", (2, 3, 4)),
    ("aaaa", (2, 2, 2, 2)),
    ("ab", (3, 4)),
]


@pytest.mark.parametrize(("variables", "shape"), CASES)
def test_fitness_is_that_of_the_matrices(variables: str, shape: tuple[int, ...]) -> None:
    t = normal(shape, seed=3)
    for field in ("complex", "real"):
        reduction = spectral_reduction(t, 2, variables=variables, field=field, n_starts=3)  # type: ignore[arg-type]
        for start in range(3):
            assert (
                abs(fitness(t, variables, reduction, start) - reduction.fitness[start])
                < 1e-9 * reduction.fitness[start]
            )
            assert all(np.isrealobj(m) == (field == "real") for m in reduction.matrices[start])
            size = sum(np.kron(x, x.conj()) for m in reduction.matrices[start] for x in m)
            assert abs(radius(size) - 1) < 1e-9


def test_every_start_is_a_local_maximum() -> None:
    t = normal((3, 4, 4), seed=4)
    reduction = spectral_reduction(t, 2, variables="abb", n_starts=4)
    rng = np.random.default_rng(0)
    for start in range(4):
        for _ in range(5):
            moved = tuple(
                m + 1e-3 * (rng.normal(size=m.shape) + 1j * rng.normal(size=m.shape)) for m in reduction.matrices[start]
            )
            near = SpectralReduction("abb", (moved,), np.zeros(1))
            assert fitness(t, "abb", near, 0) < reduction.fitness[start] * (1 + 1e-9)


def test_of_matrices_it_is_the_singular_value_decomposition() -> None:
    """Nothing new for two legs: fitness^4 is the sum of the largest d - 1 squares."""
    a = normal((5, 4), seed=5)
    s = tnlib.svd(a).value.s
    for d in (2, 3):
        reduction = spectral_reduction(a, d, n_starts=5)
        assert reduction.reached_best() == 5
        assert abs(reduction.fitness[0] ** 4 - np.sum(s[: d - 1] ** 2)) < 1e-8 * s[0] ** 2
    symmetric = a[:4] + a[:4].T
    one = spectral_reduction(symmetric, 1, variables="aa")
    assert abs(one.fitness.max() ** 2 - np.abs(np.linalg.eigvalsh(symmetric)).max()) < 1e-8


@pytest.mark.slow
def test_with_numbers_for_matrices_it_is_the_best_term_of_rank_one() -> None:
    """And with matrices as large as the tensor has legs too: they can carry one vector per leg in a cycle."""
    for seed in range(3):
        t = normal((3, 4, 2), seed=seed)
        weight = tnlib.cp(t, 1, n_starts=10, rng=0).value.weights[0]
        one, three = (spectral_reduction(t, d, field="real", n_starts=20).fitness.max() for d in (1, 3))
        assert abs(one - (weight ** (1 / 3)) / np.sqrt(3)) < 1e-5 * one
        assert three >= weight ** (1 / 3) * (1 - 1e-6)


def test_larger_matrices_reach_at_least_as_much() -> None:
    t = normal((4, 4, 4), seed=6)
    best = [spectral_reduction(t, d, variables="aaa", n_starts=10).fitness.max() for d in (1, 2, 3)]
    assert best[0] < best[1] < best[2]


def test_starts_that_reach_the_same_fitness_reach_the_same_matrices() -> None:
    t = normal((3, 5, 5), seed=7)
    reduction = spectral_reduction(t, 2, variables="abb", n_starts=8)
    at = [k for k in range(8) if reduction.fitness[k] >= (1 - 1e-9) * reduction.fitness.max()]
    assert len(at) > 1
    assert min(reduction.similarity(at[0], k) for k in at) > 0.99
    others = [k for k in range(8) if reduction.fitness[k] < (1 - 1e-4) * reduction.fitness.max()]
    assert all(reduction.similarity(at[0], k) < 0.99 for k in others)


def test_not_all_starts_reach_one_maximum() -> None:
    """The claim does not hold of every tensor: a sum of two rank-one terms has a maximum near each."""
    e = np.eye(4)
    t = np.einsum("i,j,k->ijk", e[0], e[0], e[0]) + 0.9 * np.einsum("i,j,k->ijk", e[1], e[1], e[1])
    reduction = spectral_reduction(t, 1, variables="aaa", n_starts=20)
    assert 0 < reduction.reached_best() < 20
    assert abs(reduction.fitness.max() - 1) < 1e-6
    assert abs(reduction.fitness.min() - 0.9 ** (1 / 3)) < 1e-6


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200])
def test_scale_is_no_matter(scale: float) -> None:
    t = normal((3, 3, 3), seed=8)
    one, other = (spectral_reduction(c * t, 2, variables="aaa", n_starts=2) for c in (1.0, scale))
    assert np.allclose(other.fitness, one.fitness * scale ** (1 / 3), rtol=1e-6)


def test_any_dtype_and_layout_and_the_same_again() -> None:
    t = normal((3, 3, 3), seed=9)
    t.setflags(write=False)
    want = spectral_reduction(t, 2, variables="aaa", n_starts=2)
    for same in (np.asfortranarray(t), t[::-1][::-1]):
        again = spectral_reduction(same, 2, variables="aaa", n_starts=2)
        assert np.array_equal(again.fitness, want.fitness)
    single = spectral_reduction(t.astype(np.float32), 2, variables="aaa", n_starts=2)
    assert np.allclose(single.fitness, want.fitness, rtol=1e-5)
    assert spectral_reduction(t.astype(np.complex64), 2, n_starts=1).fitness[0] > 0
    assert spectral_reduction(np.arange(8).reshape(2, 2, 2), 1, n_starts=1).fitness[0] > 0


def test_zero_and_small_tensors() -> None:
    zero = spectral_reduction(np.zeros((2, 3, 3)), 2, variables="abb", n_starts=2)
    assert np.array_equal(zero.fitness, [0, 0])
    assert all(np.isfinite(m).all() for m in zero.matrices[0])
    one = spectral_reduction(np.full((1, 1, 1), -8.0), 2, variables="aaa", n_starts=2)
    assert np.allclose(one.fitness, 2)


def test_what_is_refused() -> None:
    t = normal((2, 3, 3), seed=0)
    for bad, words in (
        ({"variables": "aab"}, "one letter to legs of one size, got 'a' for sizes [2, 3]"),
        ({"variables": "ab"}, "one letter for each of the 3 legs, got 'ab'"),
        ({"field": ["real"]}, "field must be 'complex' or 'real', got ['real']"),
        ({"field": "rational"}, "field must be 'complex' or 'real', got 'rational'"),
        ({"n_starts": 0}, "n_starts must be at least 1, got 0"),
        ({"rng": "x"}, "rng must be"),
    ):
        with refused((ValueError, TypeError), words):
            spectral_reduction(t, 2, **bad)  # type: ignore[arg-type]
    reduction = spectral_reduction(t, 2, n_starts=2)
    for start, kind in ((None, TypeError), ("0", TypeError), (0.0, TypeError), (2, ValueError), (-3, ValueError)):
        with refused(kind, "SpectralReduction.similarity: b must"):
            reduction.similarity(0, start)  # type: ignore[arg-type]
    assert reduction.similarity(0, -1) == reduction.similarity(0, 1)
    for rtol, kind in (("a", TypeError), (-1.0, ValueError), (np.ones(2), TypeError)):
        with refused(kind, "SpectralReduction.reached_best: rtol must"):
            reduction.reached_best(rtol)  # type: ignore[arg-type]
    with refused(ValueError, "t must have at least two legs, got 1"):
        spectral_reduction(np.ones(3), 2)
    with refused(ValueError, "spectral_reduction: t"):
        spectral_reduction(np.array([[np.nan, 1.0]]), 2)
    assert repr(spectral_reduction(t, 2, variables="abb", n_starts=1)).startswith(
        "SpectralReduction(abb, d = 2, fitness "
    )
