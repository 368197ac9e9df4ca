"""Decompositions of arrays that are read once: errors of the result and of its estimate, streams, and refusals."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_arrays import MAKERS, kind_of

import tnlib
from tnlib import Storage

SHAPE = (12, 14, 16, 6)
ONCE = Storage(one_pass=True)

CALLS: dict[str, Callable[..., Any]] = {
    "tt_svd": tnlib.tt_svd,
    "tucker": tnlib.tucker,
    "svd": lambda x, **options: tnlib.svd(x, left=(0, 2), **options),
}
names = pytest.mark.parametrize("name", CALLS)


def noisy(dtype: Any = np.float64, noise: float = 1e-3, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return oracles.noisy_tucker(shape, (2,) * len(shape), dtype, noise, seed)


def check(fit: Any, x: np.ndarray, rtol: float | None) -> float:
    """Hold the contract of an estimated error, and return the true one."""
    error, unit = oracles.true_error(x, fit.value), 20 * oracles.slack(fit.value)
    assert not fit.certified
    assert fit.notes
    assert fit.value.shape == x.shape
    assert fit.value.dtype == x.dtype
    assert error <= 1.6 * fit.error + unit
    assert fit.error <= 1.6 * error + unit
    if rtol is not None and fit.converged:
        assert fit.error <= rtol + unit
    oracles.assert_gauge(fit.value)
    return error


@names
@oracles.each_dtype
def test_errors_beside_those_of_two_passes(name: str, dtype: np.dtype) -> None:
    """The squared error of a sketch is expected to be at most 4 times the smallest one, in each of two stages."""
    x = noisy(dtype)
    for options in ({"max_rank": 4}, {"max_rank": 8}, {"max_rank": 8, "rtol": 1e-2}):
        once, _ = oracles.quietly(lambda o=options: CALLS[name](x, storage=ONCE, **o))
        best, _ = oracles.quietly(lambda o=options: CALLS[name](x, max_rank=o["max_rank"]))
        error = check(once, x, options.get("rtol"))
        assert once.converged
        assert error <= options.get("rtol", 4 * best.error + 10 * oracles.slack(best.value))
        assert max(once.value.ranks) <= options["max_rank"]


@given(
    noise=st.sampled_from([0.0, 1e-12, 1e-6, 1e-2]),
    rtol=st.sampled_from([None, 1e-11, 1e-5, 0.1]),
    seed=st.integers(0, 100),
    name=st.sampled_from(sorted(CALLS)),
    scale=st.sampled_from([1e-200, 1.0, 1e200]),
)
def test_tolerances_and_scales(noise: float, rtol: float | None, seed: int, name: str, scale: float) -> None:
    x = scale * noisy(noise=noise, seed=seed, shape=(9, 10, 11))
    call = CALLS[name] if name != "svd" else tnlib.svd
    arguments = {"left": 1} if name == "svd" else {}
    fit, _ = oracles.quietly(lambda: call(x, max_rank=5, rtol=rtol, storage=ONCE, **arguments))
    check(fit, x, rtol)
    assert fit.converged == (rtol is None or fit.error <= max(rtol, 1e-13))
    if noise == 0.0:
        assert fit.converged
        assert max(fit.value.ranks) <= 4


def test_coverage_of_the_confidence() -> None:
    """Of 150 arrays whose residual is nearly of rank one, the hardest case, at most 1 % exceed the bound."""
    exceeded = 0
    for seed in range(150):
        rng = np.random.default_rng(seed + 1000)
        x = np.outer(rng.standard_normal(40), rng.standard_normal(30)) + 1e-3 * np.outer(
            rng.standard_normal(40), rng.standard_normal(30)
        )
        fit, _ = oracles.quietly(lambda x=x: tnlib.svd(x, max_rank=1, storage=ONCE))
        exceeded += oracles.true_error(x, fit.value) > 1.6 * fit.error
    assert exceeded <= 1


def test_the_squared_estimate_has_the_squared_error_as_its_mean() -> None:
    """Residuals of nearly full rank, whose estimates deviate by a few percent each."""
    ratios = []
    for seed in range(10):
        x = oracles.normal((120, 100), seed=seed)
        fit, _ = oracles.quietly(lambda x=x: tnlib.svd(x, max_rank=5, storage=ONCE))
        ratios.append(fit.error / oracles.true_error(x, fit.value))
    assert abs(np.square(ratios).mean() - 1) < 0.05


@names
def test_zero_and_small_arrays(name: str) -> None:
    for x in (np.zeros((4, 3, 2, 5)), np.ones((1, 3, 1, 2)), oracles.normal((2, 2, 2, 2))):
        check(oracles.quietly(lambda x=x: CALLS[name](x, max_rank=20, storage=ONCE))[0], x, None)


# ----------------------------------------------------------------------------------------------------- streams


def slabs(x: np.ndarray, height: int) -> Iterator[np.ndarray]:
    return (x[i : i + height] for i in range(0, len(x), height))


@names
@pytest.mark.parametrize("height", [1, 5, 12])
def test_streams(name: str, height: int) -> None:
    x = noisy()
    stream = tnlib.SlabStream(slabs(x, height), x.shape, x.dtype)
    fit = CALLS[name](stream, max_rank=6, rtol=1e-2)
    check(fit, x, 1e-2)
    oracles.assert_close(fit.value.full(), CALLS[name](x, max_rank=6, rtol=1e-2, storage=ONCE).value.full(), np.float32)


def test_slabs_of_growing_scale() -> None:
    x = noisy() * np.logspace(-250, 200, SHAPE[0])[:, None, None, None]
    fit = tnlib.tt_svd(tnlib.SlabStream(slabs(x, 1), x.shape, float), max_rank=6, rtol=1e-2)
    check(fit, x, 1e-2)


@names
def test_slabs_of_growing_scale_in_single_precision(name: str) -> None:
    x = noisy(noise=0.0, shape=(8, 9, 6, 5))
    x = (x / np.abs(x).max() * np.repeat([1e-30, 1e29], 4)[:, None, None, None]).astype(np.float32)
    fit = CALLS[name](tnlib.SlabStream(slabs(x, 4), x.shape, x.dtype), max_rank=6, storage=ONCE)
    check(fit, x, None)


def test_slabs_without_rows_and_of_other_dtypes() -> None:
    x = np.arange(24).reshape(4, 3, 2)
    parts = [x[:0], x[:1].astype(np.int8), x[1:].astype(np.float16), x[:0]]
    fit = tnlib.tt_svd(tnlib.SlabStream(parts, x.shape, np.float32), max_rank=2)
    check(fit, x.astype(np.float32), None)


class CountedReads:
    """An array that counts how often every entry is read."""

    def __init__(self, a: np.ndarray) -> None:
        self.a, self.counts, self.shape, self.dtype = a, np.zeros(a.shape, int), a.shape, a.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        self.counts[index] += 1
        return self.a[index]


@names
def test_every_entry_is_read_once(name: str, tmp_path: Path) -> None:
    x = noisy(shape=(36, 14, 16, 6))
    counted = CountedReads(x)
    check(CALLS[name](counted, max_rank=6, rtol=1e-2, storage=Storage(memory=1 << 22, one_pass=True)), x, 1e-2)
    assert (counted.counts == 1).all()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    check(CALLS[name](mapped, max_rank=6, rtol=1e-2, storage=Storage(memory=1 << 22, one_pass=True)), x, 1e-2)


@names
def test_memory(name: str) -> None:
    """Tiles of one row and the sketches, which enlarge that leg, stay within the limit."""
    x, memory = oracles.normal((24, 64, 32, 16)), 5 << 20
    tracemalloc.start()
    try:
        oracles.quietly(lambda: CALLS[name](x, max_rank=2, storage=Storage(memory=memory, one_pass=True)))
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held <= memory


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_arrays_of_other_libraries(make: Callable[[Any], Any]) -> None:
    fit = tnlib.tt_svd(make(noisy()), max_rank=6, rtol=1e-2, storage=ONCE)
    assert kind_of(fit.value.full()) == kind_of(make(noisy()))


# ---------------------------------------------------------------------------------------------------- refusals


def stream_of(*parts: Any, shape: tuple[int, ...] = (4, 3, 2)) -> tnlib.SlabStream:
    return tnlib.SlabStream(parts, shape, float)


@names
def test_missing_ranks_and_folders(name: str) -> None:
    with oracles.refused(ValueError, name, "max_rank must be given", "read once"):
        CALLS[name](noisy(), storage=ONCE)
    with oracles.refused(ValueError, "Storage", "folder must be left out", "SlabStream"):
        CALLS[name](stream_of(np.ones((4, 3, 2))), max_rank=3, storage=Storage(folder="folder"))
    with oracles.refused(ValueError, name, "memory must be at least", "sketches"):
        CALLS[name](np.ones((50, 60, 70, 1)), max_rank=20, storage=Storage(memory=1 << 16, one_pass=True))


def test_streams_that_end_early_or_do_not_fit() -> None:
    def decompose(stream: tnlib.SlabStream) -> Any:
        return tnlib.tt_svd(stream, max_rank=2)

    with oracles.refused(ValueError, "tt_svd", "4 rows together, got 2", "ended early"):
        decompose(stream_of(np.ones((2, 3, 2))))
    with oracles.refused(ValueError, "tt_svd", "4 rows together, got 5 up to slab 1"):
        decompose(stream_of(np.ones((2, 3, 2)), np.ones((3, 3, 2))))
    with oracles.refused(ValueError, "tt_svd", "slab 1 must have shape (k, 3, 2)", "(2, 2, 2)"):
        decompose(stream_of(np.ones((2, 3, 2)), np.ones((2, 2, 2))))
    with oracles.refused(TypeError, "tt_svd", "slab 0", "complex128"):
        decompose(stream_of(np.ones((4, 3, 2), complex)))
    with oracles.refused(ValueError, "tt_svd", "slab 1 must be finite, got nan at index (1, 0, 0)"):
        decompose(stream_of(np.ones((2, 3, 2)), np.repeat([0.0, np.nan], 6).reshape(2, 3, 2)))
    stream = stream_of(np.ones((4, 3, 2)))
    decompose(stream)
    with oracles.refused(ValueError, "tt_svd", "must not have been read before"):
        decompose(stream)


def test_functions_that_read_an_array_twice() -> None:
    for call in (partial(tnlib.cp, rank=1), partial(tnlib.ttm_svd, row_shape=(4,), col_shape=(6,))):
        with oracles.refused(TypeError, "a SlabStream", "tt_svd, tucker and svd"):
            call(stream_of(np.ones((4, 3, 2))))
        with oracles.refused(TypeError, "one_pass=True", "tt_svd, tucker and svd"):
            call(np.ones((4, 6)), storage=ONCE)
    with oracles.refused(TypeError, "inner", "SlabStream", "tt_svd, tucker or svd"):
        tnlib.inner(stream_of(np.ones((4, 3, 2))), np.ones((4, 3, 2)))  # type: ignore[call-overload]
    with oracles.refused(TypeError, "SlabStream", "iterable"):
        tnlib.SlabStream(3, (4,), float)  # type: ignore[arg-type]
    for dtype in ("float7", object):
        with oracles.refused(TypeError, "SlabStream", "dtype must be"):
            tnlib.SlabStream([], (4,), dtype)


def test_the_chunk_with_nan_is_named() -> None:
    x = noisy(shape=(36, 14, 16, 6))
    x[30, 2, 1, 5] = np.nan
    with oracles.refused(ValueError, "tt_svd", "x must be finite, got nan at index", "of the chunk ["):
        tnlib.tt_svd(CountedReads(x), max_rank=2, storage=Storage(memory=1 << 22, one_pass=True))


def test_iterations_and_single_legs() -> None:
    with oracles.refused(ValueError, "tucker", "n_iter must be 0"):
        tnlib.tucker(noisy(), max_rank=2, n_iter=1, storage=ONCE)
    with oracles.refused(ValueError, "tt_svd", "at least 2 legs"):
        tnlib.tt_svd(np.ones(3), max_rank=2, storage=ONCE)


@pytest.mark.parametrize("decompose", [tnlib.tt_svd, tnlib.tucker])
def test_dask_arrays_are_read_in_this_process(decompose: Any) -> None:
    array = pytest.importorskip("dask.array")
    x = oracles.random_train((12, 10, 8), [1, 3, 3, 1], np.float64)
    fit = decompose(array.from_array(x, chunks=(5, 4, 8)), max_rank=9, rtol=1e-10, storage=ONCE)
    assert oracles.norm(fit.value.full() - x) <= 1e-10 * oracles.norm(x)
