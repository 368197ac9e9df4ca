"""Argument checks: each returns its argument in canonical form, or raises with function, parameter and remedy."""

from __future__ import annotations

import cmath
import contextlib
import functools
import importlib
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError, MissingFileError
from tnlib._typing import Array, MaxRank

NATIVE = ("float32", "float64", "complex64", "complex128")
NATIVE_DTYPES = frozenset(map(np.dtype, NATIVE))
HALF = ("float16", "bfloat16")  # computed in float32

_ADVICE = {"Fit": "pass fit.value", "Vidal": "pass its train()", "SlabStream": "pass it to tt_svd, tucker or svd"}
_CONVERTED = frozenset(("quimb", "tenpy", "torchtt", "tensorly", "tntorch", "pyttb", "tensorkrowch"))

_NUMPY = (np.ndarray, np.generic, list, tuple)  # converted by numpy, of which some have a namespace too
_SMALL = 1 << 12  # entries of an array whose sum of squares is computed faster than a test of every entry


def to_numpy(function: str, parameter: str, x: Any) -> Array:
    """Return `x` as a numpy array in native byte order, of any dtype, without a copy where none is needed.

    A torch tensor is detached and moved to the CPU; bfloat16, which numpy lacks, becomes float32.
    """
    if type(x) is np.ndarray and x.dtype.isnative:
        return x
    if isinstance(x, np.ma.MaskedArray) or hasattr(x, "toarray"):
        remedy = ".filled(value), or use tnlib.tucker or cp" if isinstance(x, np.ma.MaskedArray) else ".toarray()"
        raise ArgumentTypeError(
            f"{function}: {parameter} must be dense and without a mask, got a {type(x).__name__}; pass {remedy}."
        )
    is_torch = hasattr(x, "resolve_conj")
    if is_torch:
        refuse_without_entries(function, parameter, x)
    try:
        if is_torch:
            x = x.detach().cpu().resolve_conj().resolve_neg()
            x = x.float() if str(x.dtype) == "torch.bfloat16" else x
        a = np.asarray(x)
        if a.dtype == object and advice_for(x, ""):
            raise ValueError("it is not a dense array")
    except (ValueError, TypeError, RuntimeError) as problem:  # torch refuses with a RuntimeError
        raise ArgumentTypeError(
            f"{function}: {parameter} must be an array of numbers, got a {type(x).__name__} that numpy cannot "
            f"convert ({problem}); {advice_for(x, 'pass a numpy array')}."
        ) from None
    return a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))


def refuse_without_entries(function: str, parameter: str, x: Any) -> None:
    """Raise where `x` is a tensor of torch that does not store every entry."""
    layout = str(getattr(x, "layout", "torch.strided")).rpartition(".")[2]
    if layout != "strided" or getattr(x, "is_meta", False):
        kind = f"a {layout} one" if layout != "strided" else "one on the meta device"
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a dense tensor with entries, got {kind}; pass .to_dense() of it, or load "
            "it first."
        )


def is_other_array(x: Any) -> bool:
    """Test if `x` is an array of another library than numpy: a torch tensor, or one of the array API standard."""
    if type(x) is np.ndarray or isinstance(x, _NUMPY):
        return False
    return hasattr(type(x), "__array_namespace__") or hasattr(x, "resolve_conj")  # torch has no namespace method


def is_stored(x: Any) -> bool:
    """Test if `x` is read by slices and may exceed memory: a memory-mapped file, a zarr array, an h5py dataset, ..."""
    if type(x) is np.ndarray or isinstance(x, list):
        return False
    if isinstance(x, np.ndarray):
        return is_mapped(x)
    if hasattr(x, "toarray"):  # sparse; `to_numpy` refuses it with advice
        return False
    described = isinstance(getattr(x, "shape", None), tuple) and isinstance(getattr(x, "dtype", None), np.dtype)
    return described and (hasattr(type(x), "__getitem__") or hasattr(type(x), "read_slabs"))


def is_mapped(x: Any) -> bool:
    """Test if `x` is an array, or a view of one, in a memory-mapped file."""
    return isinstance(x, np.memmap) and getattr(x, "_mmap", None) is not None


def as_array(function: str, parameter: str, x: Any, *, ndim: int | None = None) -> Array:
    """Return `x` as a finite array of a native dtype: float32, float64, complex64 or complex128.

    Native input is returned unchanged, in any memory order; integers and booleans become float64, half precision
    becomes float32. `ndim` is the required number of legs; None accepts any number from one up.
    """
    a = as_numbers(function, parameter, x, ndim=ndim)
    refuse_infinite(function, parameter, a)
    return a


def as_numbers(function: str, parameter: str, x: Any, *, ndim: int | None = None) -> Array:
    """Return `as_array` without its pass over the entries; the caller must call `refuse_infinite`."""
    a: Array = x
    if type(x) is not np.ndarray or x.dtype not in NATIVE_DTYPES:
        a = _as_native(function, parameter, to_numpy(function, parameter, x))
    if ndim is not None and a.ndim != ndim:
        raise ArgumentError(
            f"{function}: {parameter} must have {plural(ndim, 'leg')}, got shape {a.shape}; reshape it first."
        )
    if a.ndim == 0 or a.size == 0:
        raise ArgumentError(
            f"{function}: {parameter} must have at least one leg and no leg of size 0, got shape {a.shape}; "
            "there is nothing in it."
        )
    return a


def _as_native(function: str, parameter: str, a: Array) -> Array:
    if a.dtype in NATIVE_DTYPES:
        return a
    if a.dtype.name in HALF:
        return a.astype(np.float32)
    if a.dtype.kind in "iub":
        return a.astype(np.float64)
    if a.dtype.kind == "U" and a.size and not (text := f"{a.flat[0]!s:.80}")[:1].isdigit():
        remedy = "open the file first" if re.search(r"[./\\]", text) else "pass the matrix or vector of that name"
        raise ArgumentTypeError(f"{function}: {parameter} must be numeric, got {a.dtype} {text!r}; {remedy}.")
    raise ArgumentTypeError(
        f"{function}: {parameter} must be real or complex of 16 to 64 bits a component, got dtype {a.dtype}; "
        f"convert it, for example with .astype(numpy.{'complex128' if a.dtype.kind == 'c' else 'float64'})."
    )


def refuse_infinite(function: str, parameter: str, a: Array) -> None:
    """Raise where `a` holds NaN or inf, and name the index of the first one."""
    if (a.size <= _SMALL and cmath.isfinite(np.vdot(a, a))) or np.isfinite(a).all():
        return
    index = tuple(np.argwhere(~np.isfinite(a))[0].tolist())
    masked = ", or pass numpy.ma.masked_invalid(x), whose known entries are fitted" * (function in ("cp", "tucker"))
    raise ArgumentError(
        f"{function}: {parameter} must be finite, got {a[index]} at index {index}; replace NaN and inf first{masked}."
    )


def as_real_dtype(function: str, dtype: Any) -> np.dtype[Any]:
    """Return the precision float32 or float64."""
    precision: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError, ValueError):  # not a name of a dtype
        precision = np.dtype(dtype)
    if precision is None or precision not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ArgumentError(
            f"{function}: dtype must be float32 or float64, got {dtype!r}; pass numpy.float32 or numpy.float64."
        )
    return precision


def as_rtol(function: str, rtol: Any) -> float | None:
    """Return a relative tolerance in [0, 1], or None."""
    if rtol is None:
        return None
    value = as_real(function, "rtol", rtol, "rtol=1e-6")
    if not 0.0 <= value <= 1.0:  # false for NaN too
        raise ArgumentError(
            f"{function}: rtol must lie between 0 and 1, got {value}; it is the relative error of the whole tensor."
        )
    return value


def as_real(function: str, parameter: str, value: Any, example: str) -> float:
    """Return a real number, NaN and inf included; the message recommends `example`."""
    if type(value) is not float and (not isinstance(value, numbers.Real) or isinstance(value, bool)):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a real number, got {value!r}; pass for example {example}."
        )
    try:
        return float(value)
    except OverflowError:  # an integer or a fraction beyond every float
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def as_count(function: str, parameter: str, value: Any, *, least: int = 1) -> int:
    """Return an integer of at least `least`."""
    count = as_integer(function, parameter, value, f"{parameter}={max(least, 8)}")
    if count < least:
        raise ArgumentError(f"{function}: {parameter} must be at least {least}, got {count}; raise it.")
    return count


def as_position(function: str, parameter: str, value: Any, count: int, what: str) -> int:
    """Return a position in [0, count) among `what` ("cores"); negative ones count from the end."""
    position = as_integer(function, parameter, value, f"{parameter}=0")
    if not -count <= position < count:
        raise ArgumentError(
            f"{function}: {parameter} must lie between {-count} and {count - 1}, one of {count} {what}, "
            f"got {position}; count from 0."
        )
    return position % count


def as_dtype(function: str, dtype: Any) -> np.dtype[Any]:
    """Return a dtype in which formats are stored: float32, float64, complex64 or complex128."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in NATIVE:
        raise ArgumentTypeError(f"{function}: dtype must be one of {', '.join(NATIVE)}, got {dtype!r}; choose one.")
    return np.dtype(name)  # type: ignore[no-any-return]


def as_rng(function: str, rng: Any) -> np.random.Generator:
    """Return a generator from a generator or a seed; None is seed 0, so that results are reproducible."""
    if isinstance(rng, np.random.Generator):
        return rng
    if rng is not None and (isinstance(rng, bool) or not isinstance(rng, numbers.Integral)):
        raise ArgumentTypeError(
            f"{function}: rng must be a numpy Generator, a seed or None, got {rng!r}; pass for example rng=0."
        )
    return np.random.default_rng(0 if rng is None else as_count(function, "rng", rng, least=0))


def as_max_rank(function: str, max_rank: Any) -> int | None:
    """Return a rank cap of at least 1, or None."""
    return None if max_rank is None else as_count(function, "max_rank", max_rank)


def as_degeneracy_tol(function: str, tolerance: Any) -> float:
    """Return the relative difference of singular values that are kept or discarded together, in [0, 1)."""
    value = as_real(function, "degeneracy_tol", tolerance, "degeneracy_tol=1e-3")
    if not 0.0 <= value < 1.0:
        raise ArgumentError(f"{function}: degeneracy_tol must lie between 0 and 1, got {value}; pass for example 1e-3.")
    return value


def as_max_ranks(function: str, max_rank: Any) -> MaxRank:
    """Return a rank cap of at least 1, one for every bond of a train, or None; `check_bonds` tests their number."""
    if max_rank is None or not is_list(max_rank):
        return as_max_rank(function, max_rank)
    return tuple(as_count(function, "max_rank", cap) for cap in max_rank)


def check_bonds(function: str, max_rank: MaxRank, bonds: int | None) -> None:
    """Raise unless rank caps are one or as many as there are `bonds`, None where they must be one."""
    if isinstance(max_rank, tuple) and len(max_rank) != bonds:
        several = "" if bonds is None else f", or one for each of {plural(bonds, 'bond')}"
        raise ArgumentError(f"{function}: max_rank must be one rank{several}, got {max_rank}; change their number.")


def as_sizes(function: str, parameter: str, sizes: Any, *, total: int | None = None) -> tuple[int, ...]:
    """Return leg sizes, all positive, whose product is `total` unless that is None."""
    if not is_list(sizes):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a sequence of leg sizes, got {sizes!r}; pass for example (4, 8)."
        )
    result = tuple(as_count(function, parameter, n) for n in sizes)
    if not result:
        raise ArgumentError(f"{function}: {parameter} must name at least one leg, got (); pass for example (4, 8).")
    if total is not None and math.prod(result) != total:
        raise ArgumentError(
            f"{function}: {parameter} must multiply to {total}, got {result} with product {math.prod(result)}; "
            "change the sizes or pad the array."
        )
    return result


def as_sizes_of_each(function: str, parameter: str, sizes: Any, count: int) -> tuple[int, ...]:
    """Return `count` sizes, from one number for all or from one for each leg or bond."""
    if not is_list(sizes):
        return (as_count(function, parameter, sizes),) * count
    each = as_sizes(function, parameter, sizes) if count else ()
    if len(each) != count:
        raise ArgumentError(f"{function}: {parameter} must be one number or {count}, got {each}; name every one.")
    return each


def as_legs(function: str, parameter: str, legs: Any, ndim: int, *, proper: bool = True) -> tuple[int, ...]:
    """Return distinct leg numbers in [0, ndim), negative ones counted from the end.

    With `proper`, at least one leg and not all of them.
    """
    try:
        result = tuple(map(_index, legs if is_list(legs) else (legs,)))
    except TypeError:
        raise ArgumentTypeError(
            f"{function}: {parameter} must be leg numbers, got {legs!r}; pass for example {parameter}=(0, 1)."
        ) from None
    if any(not -ndim <= leg < ndim for leg in result):
        raise ArgumentError(
            f"{function}: {parameter} must lie between {-ndim} and {ndim - 1}, got {legs!r}; "
            f"the tensor has {plural(ndim, 'leg')}."
        )
    result = tuple(leg % ndim for leg in result)
    if len(set(result)) < len(result):
        raise ArgumentError(f"{function}: {parameter} must name every leg once, got {legs!r}; drop the repeated one.")
    if proper and not 0 < len(result) < ndim:
        raise ArgumentError(
            f"{function}: {parameter} must name at least one leg and not all of {ndim}, got {result}; "
            "the remaining legs form the other side."
        )
    return result


def as_flag(function: str, parameter: str, value: Any) -> bool:
    """Return a bool from True, False, 1 or 0, of Python or numpy."""
    if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
        raise ArgumentTypeError(f"{function}: {parameter} must be True or False, got {value!r:.80}; choose one.")
    return bool(value)


def is_list(value: Any) -> bool:
    """Test if `value` is a sequence or an array with legs; strings do not count."""
    is_sequence = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    return is_sequence and getattr(value, "ndim", 1) > 0


def as_list(function: str, parameter: str, values: Any, kind: str) -> Sequence[Any]:
    """Return a non-empty sequence of `kind` ("arrays")."""
    if not is_list(values) or len(values) == 0:
        kind_passed, advice = type(values).__name__, advice_for(values, "pass a list")
        if is_list(values):
            kind_passed, advice = f"an empty {kind_passed}", "pass at least one"
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a non-empty sequence of {kind}, got {kind_passed}; {advice}."
        )
    checked: Sequence[Any] = values
    return checked


def advice_for(value: Any, otherwise: str) -> str:
    """Return the advice for a value of a wrong class: the part of a Fit, the train of a Vidal, a converter."""
    for kind in type(value).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "tnlib" and kind.__name__ in _ADVICE:
            return _ADVICE[kind.__name__]
        if package == "pyttb" and kind.__name__ in ("tensor", "sptensor"):
            return "pass .full().double() of it"
        if package in _CONVERTED:
            return f"convert it with tnlib_adapters.interop.{package}.from_{package}"
    return otherwise


def is_one_of(value: Any, names: Collection[str]) -> bool:
    """Test if `value` is one of these names, False for anything but a string."""
    return isinstance(value, str) and value in names


def check_choice(function: str, parameter: str, value: Any, names: Sequence[str]) -> None:
    """Raise `ArgumentError` unless `value` is one of these names, at least two."""
    if not is_one_of(value, names):
        *most, last = map(repr, names)
        raise ArgumentError(
            f"{function}: {parameter} must be {', '.join(most)} or {last}, got {value!r:.80}; choose one."
        )


def plural(count: int, noun: str) -> str:
    """Return "one leg", "3 legs"."""
    return f"one {noun}" if count == 1 else f"{count} {noun}s"


def as_integer(function: str, parameter: str, value: Any, example: str) -> int:
    """Return an integer; the message recommends `example`."""
    try:
        return _index(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{function}: {parameter} must be an integer, got {value!r}; pass for example {example}."
        ) from None


def _index(value: Any) -> int:
    """Return operator.index of anything but a bool, which Python counts among the integers."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def as_path(function: str, parameter: str, path: Any) -> Path:
    """Return a file system path."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a path, got {path!r}; pass a string or a pathlib.Path."
        )
    return Path(path)


def as_target(function: str, path: Any) -> Path:
    """Return the path of a file to write, in an existing folder; only a regular file is replaced."""
    target = as_path(function, "path", path)
    real = Path(os.path.realpath(target))  # where a symbolic link leads, which need not exist yet
    if not real.parent.is_dir():
        raise MissingFileError(
            f"{function}: the folder of path must exist, found none at {real.parent}; make it first."
        )
    if target.is_dir():
        raise ArgumentError(f"{function}: path must name a file, got the folder {target}; add a name.")
    if real.is_symlink() or (real.exists() and not real.is_file()):
        raise ArgumentError(
            f"{function}: path must name a regular file, got a device, pipe, socket or circular link at {target}; "
            "pass another name."
        )
    return target


def import_optional(function: str, module: str, package: str) -> Any:
    """Return the imported `module`, or raise with the name of the `package` to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        install = package.replace("tnlib", ".") + " in a checkout of tnlib" * ("tnlib" in package)
        text = f"{function} needs {package}, found no {error.name}; pip install {install}."
        raise ModuleNotFoundError(text, name=error.name) from None


P = ParamSpec("P")
R = TypeVar("R")

_CAP, _TOLERANCE, _STORAGE = ("max_rank", "rank"), ("rtol",), ("storage",)
_OURS = dict.fromkeys(("max_bond", "chi_max", "rank", "ranks", "rmax"), _CAP) | {"memory": _STORAGE}
_OURS |= dict.fromkeys(("cutoff", "eps", "tol", "rel"), _TOLERANCE)
_REMARKS = {"cutoff": ", the root of a cutoff on squared singular values", "memory": ", tnlib.Storage(memory=...)"}


def refuse_foreign_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with an error that names its own keyword where one of another library, or none, is passed."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    ours = {name: next((k for k in known if k in names), None) for name, known in _OURS.items() if name not in names}

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs and not ours.keys().isdisjoint(kwargs):
            name = min(ours.keys() & kwargs.keys())
            advice = f"pass {ours[name]}= instead{_REMARKS.get(name, '')}" if ours[name] else "leave it out"
            raise ArgumentTypeError(f"{function.__name__}: keywords must be those of tnlib, got {name}=; {advice}.")
        if len(args) > code.co_argcount:
            raise ArgumentTypeError(f"{function.__name__}: too many arguments without a name; pass rtol= by name.")
        return function(*args, **kwargs)

    return run
