"""Spectra on both sides of what a Gram matrix resolves: the tolerance holds, errors are true, ranks are no larger.

A Gram matrix knows singular values down to the root of eps. Whether that is enough depends on the tolerance and on what
is discarded; the library decides, and here stands what must hold on either side of the decision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
from slow_cases import mostly_slow

import tnlib

TOLERANCES = [1e-3, 1e-5, 3e-6, 1e-6, 5e-7, 2e-7, 1e-7, 1e-8, 1e-10, 1e-12, 1e-13]

# of n values, descending
SPECTRA: dict[str, Callable[[int], np.ndarray]] = {
    "geometric to 1e-16": lambda n: 10.0 ** -np.linspace(0, 16, n),
    "geometric to 1e-8": lambda n: 10.0 ** -np.linspace(0, 8, n),
    "clusters": lambda n: 10.0 ** -(4.0 * (np.arange(n) * 5 // n)),
    "narrow clusters": lambda n: 10.0 ** -(2.0 * (np.arange(n) * 8 // n)),
    "cut at 1e-7": lambda n: np.where(np.arange(n) < max(1, n // 3), 1.0, 1e-7),
    "cut at 1e-9": lambda n: np.where(np.arange(n) < max(1, n // 3), 1.0, 1e-9),
    "exactly low rank": lambda n: np.where(np.arange(n) < max(1, n // 3), 1.0 / (1 + np.arange(n)), 0.0),
}


def of_components(s: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Orthonormal components: every unfolding, with one leg in front or several, has the spectrum `s`."""
    factors = [oracles.isometry(n, len(s), dtype, seed=k) for k, n in enumerate(shape)]
    return oracles.contract(tnlib.CP(s.copy(), factors)).astype(dtype)


# name -> (spectrum, dtype) -> array
SHAPES: dict[str, Callable[[Callable[[int], np.ndarray], Any], np.ndarray]] = {
    "three legs": lambda s, dtype: of_components(s(24), (24, 26, 25), dtype),
    "four legs": lambda s, dtype: of_components(s(9), (9, 10, 9, 11), dtype),
    "wide": lambda s, dtype: oracles.with_spectrum(s(16), 16, 1024, dtype).reshape((4,) * 7),
    "square": lambda s, dtype: oracles.with_spectrum(s(128), 128, 128, dtype).reshape((2,) * 14),
    "large": lambda s, dtype: oracles.with_spectrum(s(64), 64, 1 << 12, dtype).reshape((8,) * 6),
    "tall": lambda s, dtype: oracles.with_spectrum(s(40), 640, 40, dtype).reshape(64, 10, 8, 5),
}


SMALL = [shape for shape in SHAPES if shape != "large"]


@functools.cache
def tensor(spectrum: str, shape: str, dtype: str) -> np.ndarray:
    x = SHAPES[shape](SPECTRA[spectrum], np.dtype(dtype))
    x.flags.writeable = False
    return x


@functools.cache
def unfolded(spectrum: str, shape: str, dtype: str, method: str) -> list[np.ndarray]:
    return spectra_of(tensor(spectrum, shape, dtype), method)


def spectra_of(x: np.ndarray, method: str) -> list[np.ndarray]:
    """Singular values of the unfoldings that a method truncates, computed by LAPACK in double precision."""
    wide = oracles.wide(x)
    if method == "tt_svd":
        matrices = [wide.reshape(math.prod(x.shape[:k]), -1) for k in range(1, x.ndim)]
    else:
        matrices = [np.moveaxis(wide, k, 0).reshape(x.shape[k], -1) for k in range(x.ndim)]
    return [np.linalg.svd(a, compute_uv=False) for a in matrices]


def truncated_ranks(value: Any) -> tuple[int, ...]:
    return value.ranks[1:-1] if isinstance(value, tnlib.TensorTrain) else value.ranks


def assert_within(fit: Any, x: np.ndarray, spectra: list[np.ndarray], rtol: float | None) -> None:
    """Hold the contract, and let no rank exceed what an SVD at an equal share of the tolerance would need."""
    oracles.assert_fit(fit, x, rtol=rtol)
    oracles.assert_gauge(fit.value)
    assert fit.converged
    size, eps = oracles.norm(x), oracles.eps(x.dtype)
    if rtol is None:
        assert oracles.true_error(x, fit.value) <= 1000 * eps
    # numerical ranks count what is above 32 eps of the norm; where a share is roundoff, noise may seem to need a rank
    share = None if rtol is None else rtol * size / math.sqrt(len(spectra))
    if share is not None and share < 64 * eps * size:
        return
    for rank, s in zip(truncated_ranks(fit.value), spectra, strict=True):
        tails = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1])
        needed = int(np.count_nonzero(s > 24 * eps * size if share is None else tails > share * (1 - 1e-6)))
        assert rank <= max(1, needed), f"rank {rank} at rtol={rtol}, where {needed} would do"


STRADDLED = [
    *((shape, "float64") for shape in SMALL),
    *((shape, "complex128") for shape in ("three legs", "wide")),
    *((shape, "float32") for shape in SMALL),
    *((shape, "complex64") for shape in ("three legs", "wide", "tall")),
]
FAST = [("three legs", "float64"), ("tall", "float64"), ("wide", "complex128")]
FAST += [("wide", "float32"), ("four legs", "float32"), ("three legs", "complex64")]


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
@pytest.mark.parametrize("spectrum", mostly_slow(SPECTRA, [*SPECTRA][::4]))
@pytest.mark.parametrize(("shape", "dtype"), mostly_slow(STRADDLED, FAST))
def test_every_precision(method: str, spectrum: str, shape: str, dtype: str) -> None:
    """A Gram matrix in double precision resolves all that single precision holds, or nearly so."""
    x, spectra = tensor(spectrum, shape, dtype), unfolded(spectrum, shape, dtype, method)
    double = TOLERANCES if shape != "square" else TOLERANCES[::2]
    for rtol in [None, *(double if dtype in ("float64", "complex128") else (1e-2, 1e-3, 1e-4, 3e-5, 1e-5))]:
        assert_within(oracles.METHODS[method](x, rtol), x, spectra, rtol)


@pytest.mark.slow
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_arrays_large_enough_for_row_samples_and_kernels(spectrum: str) -> None:
    x = tensor(spectrum, "large", "float64")
    spectra = unfolded(spectrum, "large", "float64", "tt_svd")
    for rtol in (None, *TOLERANCES[::2]):
        assert_within(tnlib.tt_svd(x, rtol=rtol), x, spectra, rtol)


FLAT = [(2, 8, 8), (3, 8, 8), (4, 8, 8), (8, 8, 8), (64, 8, 8), (16, 32, 32)]


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
@pytest.mark.parametrize(
    "shape", [*FLAT[::2], *(pytest.param(shape, marks=pytest.mark.slow) for shape in FLAT[1::2])], ids=str
)
def test_a_flat_tail_that_just_fits(method: str, shape: tuple[int, ...]) -> None:
    """One large value, and of the others as much as the share allows: blurred, they may seem not to fit."""
    n = shape[0]
    for level in (1e-9, 1e-8, 3e-8, 1e-7, 2e-7, 3e-7, 5e-7, 1e-6, 2e-6):
        s = np.full(n, level / math.sqrt(n - 1))
        s[0] = 1
        x = oracles.with_spectrum(s, n, math.prod(shape[1:])).reshape(shape)
        spectra = spectra_of(x, method)
        for part in (1.01, 1.1, 1.5, 2.0, 3.0, 10.0):
            rtol = part * level * math.sqrt(len(spectra))
            assert_within(oracles.METHODS[method](x, rtol), x, spectra, rtol)


def structured(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Exactly low rank, to the last bit: rounding errors then are no noise in all directions."""
    rng = np.random.default_rng(0)
    zeros = oracles.random_train(shape, [1, *[2] * (len(shape) - 1), 1])
    zeros[::2] = 0
    return {
        "ones": np.ones(shape),
        "sums of indices": sum(np.ogrid[tuple(slice(n) for n in shape)]) + 0.0,
        "products of integers": functools.reduce(np.multiply.outer, [rng.integers(-4, 5, n) for n in shape]) + 0.0,
        "every other slice is zero": zeros,
        "constant along two legs": oracles.random_train((shape[0], 1, *(1 for _ in shape[2:])), [1] * (len(shape) + 1))
        * np.ones(shape),
        "a cosine": np.cos(sum(np.ogrid[tuple(slice(0, 0.1 * n - 0.05, 0.1) for n in shape)])),
        "one entry": np.eye(1, math.prod(shape), 5).reshape(shape),
        "zero": np.zeros(shape),
    }


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
@pytest.mark.parametrize(
    "shape", [pytest.param((16, 16, 16, 16), marks=pytest.mark.slow), (100, 90), (24, 24, 24), (2,) * 13], ids=str
)
def test_numerical_ranks_of_exact_structure(method: str, shape: tuple[int, ...]) -> None:
    for x in structured(shape).values():
        spectra = spectra_of(x, method)
        for rtol in (None, 1e-3, 1e-7, 1e-10, 1e-13):
            assert_within(oracles.METHODS[method](x, rtol), x, spectra, rtol)


CAPPED = [(2, 8, 8), (3, 5, 7), (6, 300), (4, 64, 8), (8, 8, 8, 8), (16, 20, 24), (2,) * 10]


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
@pytest.mark.parametrize(
    "shape",
    [*CAPPED[::3], *(pytest.param(shape, marks=pytest.mark.slow) for shape in CAPPED[1::3] + CAPPED[2::3])],
    ids=str,
)
@pytest.mark.parametrize(("rank", "dtype"), [(3, np.float64), (1, np.complex128), (3, np.float32)])
def test_a_cap_above_a_rank_does_not_change_it(method: str, shape: tuple[int, ...], rank: int, dtype: type) -> None:
    """With a tolerance and a cap the smaller rank wins; with a cap alone numerical ranks do where they are smaller."""
    inputs = [
        oracles.random_tucker(shape, [min(rank, n) for n in shape], dtype),
        oracles.random_train(
            shape, [1, *[rank] * (len(shape) - 1), 1], dtype
        ),  # a cap may cut some legs and not others
    ]
    for x in inputs:
        for rtol in (None, 1e-3) if dtype == np.float32 else (None, 1e-3, 1e-8, 1e-12):
            free = truncated_ranks(oracles.METHODS[method](x, rtol).value)
            for cap in (rank, rank + 1, 100):
                fit, warned = oracles.quietly(functools.partial(oracles.METHODS[method], x, rtol, cap))
                oracles.assert_fit(fit, x, rtol=rtol)
                oracles.assert_warned(fit, warned)
                assert all(r <= min(cap, f) for r, f in zip(truncated_ranks(fit.value), free, strict=True))


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("cap", [1, 3, 8])
def test_what_a_cap_discards_is_known(method: str, spectrum: str, cap: int) -> None:
    """No rank allows a smaller error than its tail, and one such tail per truncation is lost at most."""
    x = tensor(spectrum, "three legs", "float64")
    s = SPECTRA[spectrum](24)
    fit, warned = oracles.quietly(lambda: oracles.METHODS[method](x, None, cap))
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    oracles.assert_warned(fit, warned)
    best = np.linalg.norm(s[cap:]) / np.linalg.norm(s)
    assert fit.error >= best * (1 - 1e-9) - 2e-13
    assert fit.error <= best * math.sqrt(len(truncated_ranks(fit.value))) * 1.05 + 2e-13


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
def test_ranks_grow_as_the_tolerance_shrinks(method: str) -> None:
    for spectrum in SPECTRA:
        x, below = tensor(spectrum, "three legs", "float64"), (0,) * 4
        for rtol in TOLERANCES:
            ranks = oracles.METHODS[method](x, rtol).value.ranks
            assert all(r >= b for r, b in zip(ranks, below, strict=False))
            below = ranks


@pytest.mark.parametrize("method", ["tt_svd", "tucker"])
@pytest.mark.parametrize("c", [1e-300, 1e-110, 1e110, 1e300])
def test_routes_do_not_depend_on_scale(method: str, c: float) -> None:
    for rtol in (1e-4, 1e-7, 1e-11):
        for spectrum in ("geometric to 1e-16", "cut at 1e-7"):
            x = tensor(spectrum, "four legs", "float64")
            want, got = (oracles.METHODS[method](a, rtol) for a in (x, c * x))
            assert got.value.ranks == want.value.ranks
            assert got.error == pytest.approx(want.error, rel=0.1, abs=1e-14)  # each is within 5 percent
            oracles.assert_fit(got, c * x, rtol=rtol)
