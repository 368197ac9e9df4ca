"""Dense references that assert, and inputs whose spectrum, ranks, dtype and layout are known.

Everything here is plain numpy on dense arrays, slower and simpler than the library, and shares no code with it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow

import tnlib

DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "complex64", "complex128"))
each_dtype = pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [np.float64, np.complex64]), ids=str)


def eps(dtype: Any) -> float:
    return float(np.finfo(dtype).eps)


def slack(value: Any) -> float:
    """Relative error that roundoff alone may cause in `value.full()`."""
    return 32 * eps(value.dtype) * np.sqrt(max(1, len(value.ranks)))


# ----------------------------------------------------------------------------------------------- dense references


def wide(a: Any) -> np.ndarray:
    a = np.asarray(a)
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def norm(a: Any) -> float:
    """Frobenius norm in double precision; the largest entry is divided out, so squares stay in range."""
    flat = wide(a).ravel()
    top = float(np.abs(flat).max())
    return 0.0 if top == 0 else top * float(np.linalg.norm(flat / top))


def true_error(x: Any, value: Any) -> float:
    """norm(x - value.full()) / norm(x), 0 / 0 being 0."""
    difference, size = norm(wide(x) - wide(value.full())), norm(x)
    return difference / size if size > 0 else difference


def contract(value: Any) -> np.ndarray:
    """Multiply a format out with one einsum per format, written from its definition."""
    match value:
        case tnlib.SVD():
            n_left = value.u.ndim - 1
            flat = np.einsum(
                "ar,r,rb->ab", value.u.reshape(-1, len(value.s)), value.s, value.vh.reshape(len(value.s), -1)
            )
            split = flat.reshape(value.u.shape[:-1] + value.vh.shape[1:])
            right = [k for k in range(split.ndim) if k not in value.left]
            assert len(value.left) == n_left
            return np.moveaxis(split, range(split.ndim), [*value.left, *right])
        case tnlib.LowRank():
            return np.einsum("ar,rb->ab", value.left, value.right)
        case tnlib.TensorTrain():
            return np.exp(value.log_scale) * dense_train(value.cores)
        case tnlib.TTMatrix():
            pairs = dense_train([c.reshape(c.shape[0], -1, c.shape[3]) for c in value.cores])
            split = pairs.reshape([n for c in value.cores for n in c.shape[1:3]])
            d = len(value.cores)
            rows_first = split.transpose([*range(0, 2 * d, 2), *range(1, 2 * d, 2)])
            return np.exp(value.log_scale) * rows_first.reshape(value.shape)
        case tnlib.Tucker():
            out = value.core
            for k, factor in enumerate(value.factors):
                out = np.moveaxis(np.moveaxis(out, k, -1) @ factor.T, -1, k)
            return out
        case tnlib.CP():
            terms = [
                w * functools.reduce(np.multiply.outer, [f[:, j] for f in value.factors])
                for j, w in enumerate(value.weights)
            ]
            return np.sum(terms, axis=0)
        case tnlib.KroneckerTerms():
            rights = [contract(b) if isinstance(b, tnlib.LowRank) else b for b in value.right]
            return np.sum([np.kron(a, b) for a, b in zip(value.left, rights, strict=True)], axis=0)
    raise AssertionError(f"no reference for {type(value).__name__}")


def dense_train(cores: Sequence[np.ndarray]) -> np.ndarray:
    out = np.ones(1, cores[0].dtype)
    for core in cores:
        out = np.einsum("...l,lnr->...nr", out, core)
    return out[..., 0]


def train_ranks(x: np.ndarray) -> tuple[int, ...]:
    """Numerical rank of every unfolding of a train, the ends included."""
    cuts = [np.prod(x.shape[:k], dtype=int) for k in range(1, x.ndim)]
    return (1, *(int(np.linalg.matrix_rank(wide(x).reshape(cut, -1), rtol=1e-9)) for cut in cuts), 1)


# ------------------------------------------------------------------------------------------------------ assertions


def assert_close(got: Any, want: Any, dtype: Any = np.float64, factor: float = 64) -> None:
    """Equal up to `factor` eps of the norm of what is wanted; shapes must agree."""
    assert np.shape(got) == np.shape(want), f"shape {np.shape(got)}, wanted {np.shape(want)}"
    distance, allowed = norm(wide(got) - wide(want)) if np.size(got) else 0.0, factor * eps(dtype) * norm(want)
    assert distance <= allowed, f"off by {distance:.3g}, allowed {allowed:.3g}"


def assert_fit(fit: Any, x: Any, *, rtol: float | None = None, tight: bool = True) -> None:
    """Hold the whole contract of a result: shape, dtype, certified error, tolerance, honesty of `converged`."""
    value = fit.value
    assert isinstance(fit, tnlib.Fit)
    assert value.shape == np.shape(x)
    assert value.full().shape == value.shape
    assert value.full().dtype == value.dtype
    assert value.n_parameters == sum(a.size for a in value.arrays())
    assert all(np.isfinite(a).all() for a in value.arrays()), "an array holds NaN or inf"
    error, unit = true_error(x, value), slack(value)
    assert fit.certified
    assert isinstance(fit.error, float)
    assert error <= fit.error + unit, f"the true error {error:.3g} exceeds the reported {fit.error:.3g}"
    if tight and error > 1000 * eps(value.dtype):
        assert fit.error <= 1.05 * error, f"reported {fit.error:.3g}, more than 5 % above the true {error:.3g}"
    if error <= 1000 * eps(value.dtype):
        assert fit.error <= 1200 * eps(value.dtype), f"reported {fit.error:.3g}: a floor above the true {error:.3g}"
    if rtol is not None and fit.converged:
        assert error <= rtol + unit, f"the error {error:.3g} exceeds rtol={rtol:.3g}"
    if rtol is not None and not fit.converged:
        assert fit.error > rtol, f"not converged, at error {fit.error:.3g} within rtol={rtol:.3g}"


def assert_isometric(u: np.ndarray) -> None:
    """The columns of `u`, all legs but the last flattened, are orthonormal."""
    flat = u.reshape(-1, u.shape[-1])
    gram = wide(flat.conj().T @ flat)
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=64 * eps(u.dtype) * np.sqrt(len(gram)))


def assert_signs(u: np.ndarray) -> None:
    """In each column the first entry whose modulus is within sqrt(eps) of the largest is positive real."""
    flat = u.reshape(-1, u.shape[-1])
    for column in flat.T:
        size = np.abs(column)
        lead = column[np.flatnonzero(size >= (1 - np.sqrt(eps(u.dtype))) * size.max())[0]]
        assert lead.real > 0, f"the leading entry {lead} is not positive"
        assert abs(lead.imag) <= 8 * eps(u.dtype), f"the leading entry {lead} is not real"


def assert_gauge(value: Any) -> None:
    """The gauge that each decomposition documents: isometries, signs, order."""
    match value:
        case tnlib.SVD():
            assert_isometric(value.u)
            assert_isometric(np.moveaxis(value.vh, 0, -1).conj())
            assert_signs(value.u)
            assert (value.s >= 0).all()
            assert (np.diff(value.s) <= 0).all()
        case tnlib.TensorTrain() | tnlib.TTMatrix():
            assert value.center == len(value.cores) - 1
            for core in value.cores[:-1]:
                assert_isometric(core)
                assert_signs(core)
        case tnlib.Tucker():
            for factor in value.factors:
                assert_isometric(factor)
                assert_signs(factor)
        case tnlib.CP():
            assert not np.iscomplexobj(value.weights)
            assert (value.weights >= 0).all()
            assert (np.diff(value.weights) <= 0).all()
            for factor in value.factors:
                np.testing.assert_allclose(np.linalg.norm(wide(factor), axis=0), 1, rtol=64 * eps(factor.dtype))
            for factor in value.factors[:-1]:
                assert_signs(factor)
        case _:
            raise AssertionError(f"no gauge is known for {type(value).__name__}")


def assert_same_bits(a: Any, b: Any) -> None:
    """Two formats hold the same arrays, bit for bit, and the same of everything else."""
    assert type(a) is type(b)
    assert len(a.arrays()) == len(b.arrays())
    for one, other in zip(a.arrays(), b.arrays(), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    for name in ("center", "log_scale"):
        assert getattr(a, name, None) == getattr(b, name, None)
    if isinstance(a, tnlib.SVD):
        assert a.left == b.left


@contextlib.contextmanager
def unchanged(*arrays: np.ndarray) -> Iterator[None]:
    before = [(a.tobytes(), a.shape, a.strides, a.flags.writeable) for a in arrays]
    yield
    assert before == [(a.tobytes(), a.shape, a.strides, a.flags.writeable) for a in arrays], "an argument was changed"


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises a TnlibError that is also a `kind`, whose message holds every one of `words`."""
    with pytest.raises(tnlib.TnlibError) as caught:
        yield
    assert isinstance(caught.value, kind), f"{type(caught.value).__name__} is no {kind.__name__}"
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    assert "\n" not in message


def quietly(call: Callable[[], Any]) -> tuple[Any, list[type[Warning]]]:
    """Return the result of `call` and the categories of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [w.category for w in caught]


def assert_warned(fit: Any, categories: Sequence[type[Warning]]) -> None:
    """What a fit says of itself and what it warned of are the same, and it warned of nothing else."""
    assert (tnlib.ConvergenceWarning in categories) == (not fit.converged)
    assert (tnlib.DegenerateCutWarning in categories) == bool(fit.notes)
    assert set(categories) <= {tnlib.ConvergenceWarning, tnlib.DegenerateCutWarning}


# ---------------------------------------------------------------------------------------------------------- inputs


def normal(shape: Sequence[int], dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def isometry(m: int, r: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    wider = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    return np.linalg.qr(normal((m, r), wider, seed))[0]


def with_spectrum(s: Any, m: int, n: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """A matrix (m, n) with singular values `s`, made in double precision and rounded once."""
    s = np.asarray(s, float)
    u, v = isometry(m, len(s), dtype, seed), isometry(n, len(s), dtype, seed + 1)
    return ((u * s) @ v.conj().T).astype(dtype)


def random_cores(
    shape: Sequence[int], ranks: Sequence[int], dtype: Any = np.float64, seed: int = 0
) -> list[np.ndarray]:
    return [normal((ranks[k], n, ranks[k + 1]), dtype, seed + k) for k, n in enumerate(shape)]


def random_train(shape: Sequence[int], ranks: Sequence[int], dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    wider = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    x = dense_train(random_cores(shape, ranks, wider, seed))
    return (x / np.linalg.norm(x)).astype(dtype)


def random_tucker(shape: Sequence[int], ranks: Sequence[int], dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    wider = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    factors = [isometry(n, r, dtype, seed + 7 * k) for k, (n, r) in enumerate(zip(shape, ranks, strict=True))]
    return contract(tnlib.Tucker(normal(ranks, wider, seed), factors)).astype(dtype)


def noisy_tucker(
    shape: Sequence[int], ranks: Sequence[int], dtype: Any = np.float64, noise: float = 1e-3, seed: int = 0
) -> np.ndarray:
    """A Tucker tensor of these ranks and norm 1 plus normally distributed noise of norm `noise`."""
    x = random_tucker(shape, ranks, dtype, seed)
    return (x / norm(x) + noise * normal(shape, dtype, seed + 50) / np.sqrt(x.size)).astype(dtype)


def random_cp(shape: Sequence[int], rank: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """Components with orthonormal columns and weights of 3, 2, 1 ...: alternating least squares finds them quickly."""
    factors = [isometry(n, rank, dtype, seed + 5 * k) for k, n in enumerate(shape)]
    return contract(tnlib.CP(np.arange(rank, 0, -1.0), factors)).astype(dtype)


def hilbert(shape: Sequence[int]) -> np.ndarray:
    """1 / (i + j + ... + 1): every unfolding has a spectrum that decays geometrically down to roundoff."""
    return 1.0 / (1.0 + sum(np.ogrid[tuple(slice(n) for n in shape)]))


def ghz(d: int, n: int = 2, dtype: Any = np.float64) -> np.ndarray:
    """Ones on the superdiagonal: n equal singular values on every bond."""
    x = np.zeros((n,) * d, dtype)
    x[(np.arange(n),) * d] = 1
    return x


SPECTRA: dict[str, Callable[[int], np.ndarray]] = {
    "geometric, ratio 1/2": lambda n: 0.5 ** np.arange(n),
    "geometric, ratio 1/10": lambda n: 0.1 ** np.arange(n),
    "clusters": lambda n: 10.0 ** -(3.0 * (np.arange(n) // 4)) * (1 - 1e-3 * (np.arange(n) % 4)),
    "exact cut": lambda n: np.where(np.arange(n) < n // 3, 1.0 / (1 + np.arange(n)), 0.0),
    "harmonic": lambda n: 1.0 / (1.0 + np.arange(n)),
    "flat": lambda n: np.linspace(1.0, 0.9, n),
    "one large": lambda n: np.concatenate([[1.0], np.full(n - 1, 1e-6) * np.linspace(1, 0.5, n - 1)]),
}


def _embedded(x: np.ndarray) -> np.ndarray:
    """A slice with a step along every leg of a larger array full of NaN."""
    big = np.full([2 * n for n in x.shape], np.nan, x.dtype)
    big[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return big[tuple(slice(None, None, 2) for _ in x.shape)]


def _reversed(x: np.ndarray) -> np.ndarray:
    flip = tuple(slice(None, None, -1) for _ in x.shape)
    return np.ascontiguousarray(x[flip])[flip]


def _read_only(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    out.flags.writeable = False
    return out


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "negative strides": _reversed,
    "slices": _embedded,
    "read-only": _read_only,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
}


def formats(dtype: Any, seed: int = 0) -> Iterator[Any]:
    """One or more values of every format, in no particular gauge."""
    seeds = itertools.count(seed)

    def a(*shape: int) -> np.ndarray:
        return normal(shape, dtype, next(seeds))

    real = np.zeros(0, dtype).real.dtype
    yield tnlib.SVD(
        isometry(6, 3, dtype).astype(dtype), np.array([3, 2, 1], real), isometry(5, 3, dtype).T.astype(dtype)
    )
    tensor = (
        isometry(8, 3, dtype).astype(dtype).reshape(2, 4, 3),
        isometry(15, 3, dtype).T.astype(dtype).reshape(3, 3, 5),
    )
    yield tnlib.SVD(tensor[0], np.array([3, 2, 1], real), tensor[1], left=(3, 1))
    yield tnlib.LowRank(a(6, 2), a(2, 5))
    yield tnlib.LowRank(a(3, 7), a(7, 4))
    yield tnlib.TensorTrain([a(1, 2, 3), a(3, 4, 2), a(2, 3, 1)])
    yield tnlib.TensorTrain([a(1, 4, 1)], center=0, log_scale=-1.5)
    yield tnlib.TensorTrain([a(1, 3, 1)])
    yield tnlib.TTMatrix([a(1, 3, 2, 1)])
    yield tnlib.TTMatrix([a(1, 2, 3, 2), a(2, 4, 1, 3), a(3, 2, 2, 1)], log_scale=0.5)
    yield tnlib.Tucker(a(2, 3, 1), [a(4, 2), a(5, 3), a(2, 1)])
    yield tnlib.CP(a(3), [a(4, 3), a(5, 3), a(2, 3)])
    yield tnlib.CP(a(2), [a(4, 2)])
    yield tnlib.KroneckerTerms(a(2, 3, 4), [a(2, 5), a(2, 5)])
    yield tnlib.KroneckerTerms(a(3, 2, 3), [tnlib.LowRank(a(4, 2), a(2, 3)) for _ in range(3)])


def format_id(value: Any) -> str:
    return f"{type(value).__name__}-{'x'.join(map(str, value.shape))}-{value.dtype}"


ALL_FORMATS = [value for dtype in DTYPES for value in formats(dtype)]
OPERATORS = [v for v in ALL_FORMATS if isinstance(v, tnlib.LowRank | tnlib.TTMatrix | tnlib.KroneckerTerms)]

# What the functions that decompose a tensor share: a name in messages, and a call that takes rtol and a rank cap.
METHODS: dict[str, Callable[..., Any]] = {
    "svd": lambda x, rtol=None, cap=None: tnlib.svd(x, left=0, rtol=rtol, max_rank=cap),
    "tt_svd": lambda x, rtol=None, cap=None: tnlib.tt_svd(x, rtol=rtol, max_rank=cap),
    "tucker": lambda x, rtol=None, cap=None: tnlib.tucker(x, rtol=rtol, ranks=cap),
    "ttm_svd": lambda x, rtol=None, cap=None: tnlib.ttm_svd(x, *_halves(x), rtol=rtol, max_rank=cap),
}


def _halves(x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split both sides of a matrix into their prime factors, padded with ones to one length."""
    rows, columns = (_primes(n) for n in np.shape(x))
    d = max(len(rows), len(columns))
    return rows + (1,) * (d - len(rows)), columns + (1,) * (d - len(columns))


def _primes(n: int) -> tuple[int, ...]:
    for p in range(2, n):
        if n % p == 0:
            return (p, *_primes(n // p))
    return (n,)


def assert_one_sentence(stderr: str, words: tuple[str, ...]) -> None:
    """A command ends with one sentence on standard error, which says these words; bars may stand above it."""
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    *above, last = stderr.splitlines()
    assert last.startswith("Error: ")
    assert last.endswith(".")
    assert not any("Error" in line for line in above)
    for word in words:
        assert word in last, f"{word!r} is not in {last!r}"
