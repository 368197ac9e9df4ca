"""Save and load formats: one safetensors file, a JSON header, no pickle.

Arrays lie under the names that the formats give them, complex ones as pairs of reals on a last leg of size 2. The
header says the version, the format, which arrays are complex, what a format knows beside its arrays, and a digest of
all that and of the arrays: a bit that flips on a disk makes a damaged file, not another number.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentTypeError, FileFormatError, MissingFileError, TnlibError
from tnlib._fit import Fit
from tnlib._typing import Array
from tnlib._validate import as_path, as_target
from tnlib.formats.cp import CP
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.formats.vidal import Vidal

Saveable: TypeAlias = SVD | LowRank | TensorTrain | TTMatrix | Tucker | CP | KroneckerTerms | Vidal

VERSION = 1
_KEY = "tnlib"  # of the JSON header among the metadata of the safetensors file
_STORED = ("float32", "float64")


def save(path: str | os.PathLike[str], value: Saveable) -> None:
    """Write `value` to one file that `load` reads back bit for bit; the file appears whole or not at all.

    Parameters
    ----------
    path
        Where to write; an existing file is replaced.
    value
        Any format of tnlib. Of a `Fit`, save its `value`.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `value` is not a format, or `path` is no path or a folder.
    MissingFileError
        If the folder of `path` does not exist.

    Examples
    --------
    >>> import numpy as np, os, tempfile, tnlib
    >>> path = os.path.join(tempfile.mkdtemp(), "ones.safetensors")
    >>> tnlib.save(path, tnlib.tt_svd(np.ones((2, 3))).value)
    >>> tnlib.load(path).ranks
    (1, 1, 1)
    """
    from safetensors.numpy import save as to_bytes

    target = as_target("save", path)
    if not isinstance(value, Saveable):
        hint = "save its .value" if isinstance(value, Fit) else "decompose it first"
        raise ArgumentTypeError(f"save: value must be a format of tnlib, got {type(value).__name__}; {hint}.")
    header = {"version": VERSION, "format": type(value).__name__, **_header(value)}
    tensors = {name: _as_real(a) for name, a in _named(value).items()}
    header["complex"] = [name for name, a in _named(value).items() if np.iscomplexobj(a)]
    header["digest"] = _digest(header, tensors)
    write_whole(target, to_bytes(tensors, {_KEY: json.dumps(header)}))


def load(path: str | os.PathLike[str]) -> Saveable:
    """Read the format that `save` wrote.

    Parameters
    ----------
    path
        A file written by `save`.

    Returns
    -------
    SVD | LowRank | TensorTrain | TTMatrix | Tucker | CP | KroneckerTerms | Vidal
        Equal to what was saved, bit for bit, centre and scale included.

    Raises
    ------
    FileFormatError
        If the file is cut short or changed by a single bit, is no file of tnlib, or was written by a newer version.
    MissingFileError
        If there is no such file.

    Examples
    --------
    See `save`.
    """
    from safetensors import SafetensorError, safe_open

    file = as_path("load", "path", path)
    if not file.is_file():
        raise MissingFileError(f"load: path must be a file written by tnlib.save, found none at {file}.")
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            if _KEY not in metadata:
                raise FileFormatError(
                    f"load: {file} is a safetensors file without a tnlib header; read it with safetensors.numpy."
                )
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, AttributeError, KeyError, TypeError) as problem:  # the latter: dtypes that numpy lacks
        raise FileFormatError(
            f"load: {file} is not a whole safetensors file ({problem}); it may be cut short, save it again."
        ) from None
    try:
        header = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as problem:
        raise _damaged(file, problem) from None
    return _build(file, header, arrays)


def _named(value: Saveable) -> dict[str, Array]:
    """Name the arrays of a format as its file names them."""
    match value:
        case SVD(u=u, s=s, vh=vh):
            return {"u": u, "s": s, "vh": vh}
        case LowRank(left=left, right=right):
            return {"left": left, "right": right}
        case TensorTrain(cores=cores) | TTMatrix(cores=cores):
            return {f"cores.{k}": core for k, core in enumerate(cores)}
        case Tucker(core=core, factors=factors):
            return {"core": core} | {f"factors.{k}": f for k, f in enumerate(factors)}
        case CP(weights=weights, factors=factors):
            return {"weights": weights} | {f"factors.{k}": f for k, f in enumerate(factors)}
        case KroneckerTerms(left=left, right=right):
            named = {"left": left}
            for h, term in enumerate(right):
                if isinstance(term, LowRank):
                    named |= {f"right.{h}.left": term.left, f"right.{h}.right": term.right}
                else:
                    named[f"right.{h}"] = term
            return named
        case Vidal(gammas=gammas, lambdas=lambdas):
            named = {f"gammas.{k}": gamma for k, gamma in enumerate(gammas)}
            return named | {f"lambdas.{k}": s for k, s in enumerate(lambdas)}


def _header(value: Saveable) -> dict[str, Any]:
    """Return what a format knows beside its arrays."""
    match value:
        case SVD(left=left):
            return {"left": list(left or ())}
        case TensorTrain() | TTMatrix():
            return {"center": value.center, "log_scale": value.log_scale}
        case Vidal(log_scale=log_scale):
            return {"log_scale": log_scale}
        case _:
            return {}


def _build(file: Path, header: Any, stored: Mapping[str, Array]) -> Saveable:
    try:
        version, name = header["version"], header["format"]
        if type(version) is not int or version != VERSION:
            raise FileFormatError(
                f"load: {file} has version {version!r}, this tnlib reads version {VERSION}; install a newer tnlib."
            )
        value = _assemble(name, header, _as_saved(header, stored))
        if value is None:
            raise FileFormatError(
                f"load: {file} holds a format {name!r} that this tnlib does not know; install a newer tnlib."
            )
        _refuse_unknown(file, "arrays", stored, _named(value))
        _refuse_unknown(file, "keys", header, ("version", "format", "complex", "digest", *_header(value)))
        digest = header["digest"]
    except FileFormatError:
        raise
    except TnlibError as problem:
        raise FileFormatError(f"load: {file} does not hold a valid {name}: {problem}") from None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
        raise _damaged(file, problem) from None
    if digest != _digest({key: x for key, x in header.items() if key != "digest"}, stored):
        raise FileFormatError(f"load: {file} was changed after it was saved; its digest differs, save it again.")
    return value


def _assemble(name: Any, header: Mapping[str, Any], a: Mapping[str, Array]) -> Saveable | None:
    match name:
        case "SVD":
            return SVD(a["u"], a["s"], a["vh"], tuple(header["left"]))
        case "LowRank":
            return LowRank(a["left"], a["right"])
        case "TensorTrain" | "TTMatrix":
            train = TensorTrain if name == "TensorTrain" else TTMatrix
            return train(_listed(a, "cores"), header["center"], header["log_scale"])
        case "Tucker":
            return Tucker(a["core"], _listed(a, "factors"))
        case "CP":
            return CP(a["weights"], _listed(a, "factors"))
        case "KroneckerTerms":
            right = [
                LowRank(a[f"right.{h}.left"], a[f"right.{h}.right"]) if f"right.{h}.left" in a else a[f"right.{h}"]
                for h in range(len(a["left"]))
            ]
            return KroneckerTerms(a["left"], tuple(right))
        case "Vidal":
            return Vidal(_listed(a, "gammas"), _listed(a, "lambdas"), header["log_scale"])
    return None


def _as_saved(header: Mapping[str, Any], stored: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of the format: of pairs of reals, what they stand for."""
    pairs = header["complex"]
    if not isinstance(pairs, list) or not set(pairs) <= stored.keys():
        raise ValueError(f"complex must list arrays, got {pairs!r}")
    for name, a in stored.items():
        if a.dtype.name not in _STORED or (name in pairs and a.shape[-1:] != (2,)):
            raise ValueError(f"{name} has dtype {a.dtype} and shape {a.shape}")
    return {name: _as_complex(a) if name in pairs else a for name, a in stored.items()}


def _refuse_unknown(file: Path, what: str, found: Iterable[str], known: Iterable[str]) -> None:
    more = sorted(set(found) - set(known))
    if more:
        raise FileFormatError(f"load: {file} holds {what} {more} that this tnlib does not know; install a newer tnlib.")


def _damaged(file: Path, problem: Exception) -> FileFormatError:
    what = " ".join(str(problem).split())
    return FileFormatError(
        f"load: {file} has a damaged tnlib header ({type(problem).__name__}: {what}); save it again."
    )


def _digest(header: Mapping[str, Any], stored: Mapping[str, Array]) -> str:
    """Return 128 bits that depend on every bit of what a file says."""
    found = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(stored):
        a = np.ascontiguousarray(stored[name])
        found.update(json.dumps([name, a.dtype.name, a.shape]).encode())
        found.update(a.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _listed(arrays: Mapping[str, Array], prefix: str) -> tuple[Array, ...]:
    return tuple(arrays[f"{prefix}.{k}"] for k in range(sum(key.startswith(f"{prefix}.") for key in arrays)))


def _as_real(a: Array) -> Array:
    """Return complex data as pairs of reals on a last leg of size 2: safetensors has no 128-bit complex dtype."""
    a = np.ascontiguousarray(a)
    return a.view(a.real.dtype).reshape(*a.shape, 2) if np.iscomplexobj(a) else a


def _as_complex(a: Array) -> Array:
    return np.ascontiguousarray(a).view(np.result_type(a.dtype, np.complex64))[..., 0]


def write_whole(path: Path, data: bytes) -> None:
    """Write beside `path` and rename, so that no reader and no crash ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already where all went well
