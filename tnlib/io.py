"""Save and load formats: one safetensors file, a JSON header, no pickle."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentTypeError, FileFormatError, MissingFileError, TnlibError
from tnlib._fit import Fit
from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib.formats.cp import CP
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker

Saveable: TypeAlias = SVD | LowRank | TensorTrain | TTMatrix | Tucker | CP | KroneckerTerms

VERSION = 1
_KEY = "tnlib"  # of the JSON header among the metadata of the safetensors file


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
    ArgumentTypeError
        If `value` is not a format, or `path` is no path.
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

    target = as_path("save", "path", path)
    if not target.absolute().parent.is_dir():
        raise MissingFileError(f"save: the folder of path must exist, found none at {target.parent}; make it first.")
    if not isinstance(value, Saveable):
        hint = "save its .value" if isinstance(value, Fit) else "decompose it first"
        raise ArgumentTypeError(f"save: value must be a format of tnlib, got {type(value).__name__}; {hint}.")
    header = {"version": VERSION, "format": type(value).__name__, **_header(value)}
    tensors = {name: _as_real(a) for name, a in _named(value).items()}
    header["complex"] = [name for name, a in _named(value).items() if np.iscomplexobj(a)]
    write_whole(target, to_bytes(tensors, {_KEY: json.dumps(header)}))


def load(path: str | os.PathLike[str]) -> Saveable:
    """Read the format that `save` wrote.

    Parameters
    ----------
    path
        A file written by `save`.

    Returns
    -------
    SVD | LowRank | TensorTrain | TTMatrix | Tucker | CP | KroneckerTerms
        Equal to what was saved, bit for bit, centre and scale included.

    Raises
    ------
    FileFormatError
        If the file is cut short, is no file of tnlib, or was written by a newer version.
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
            header = json.loads(metadata[_KEY])
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, json.JSONDecodeError) as problem:
        raise FileFormatError(
            f"load: {file} is not a whole safetensors file ({problem}); it may be cut short, save it again."
        ) from None
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


def _header(value: Saveable) -> dict[str, Any]:
    """Return what a format knows beside its arrays."""
    match value:
        case SVD(left=left):
            return {"left": list(left or ())}
        case TensorTrain() | TTMatrix():
            return {"center": value.center, "log_scale": value.log_scale}
        case _:
            return {}


def _build(file: Path, header: Any, stored: Mapping[str, Array]) -> Saveable:
    try:
        version, name = header["version"], header["format"]
        if version != VERSION:
            raise FileFormatError(
                f"load: {file} has version {version!r}, this tnlib reads version {VERSION}; install a newer tnlib."
            )
        a = {key: _as_complex(x) if key in header["complex"] else x for key, x in stored.items()}
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
    except FileFormatError:
        raise
    except TnlibError as problem:
        raise FileFormatError(f"load: {file} does not hold a valid {name}: {problem}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise FileFormatError(
            f"load: {file} has a damaged tnlib header ({type(problem).__name__}: {problem}); save it again."
        ) from None
    raise FileFormatError(f"load: {file} holds a format {name!r} that this tnlib does not know; install a newer tnlib.")


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
