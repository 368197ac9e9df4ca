"""Save and load formats: one safetensors file, a JSON header, no pickle.

Arrays have the names that the format gives them (`Format.named_arrays`); complex ones are pairs of reals on a last leg
of size 2. The header holds the version, the class, the names of complex arrays, the values that the format stores
beside its arrays (`Format.attributes`), and a digest of all these and the arrays, so that a flipped bit on a disk is an
error and not another number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, FileFormatError, MissingFileError, TnlibError
from tnlib._files import write_whole
from tnlib._fit import refuse_other_arrays, wrong_type
from tnlib._format import Format
from tnlib._registry import format_class
from tnlib._typing import Array
from tnlib._validate import as_path, as_target

VERSION = 2
_RENAMED: dict[int, dict[str, str]] = {  # version -> attribute -> its name in files of that version
    1: {"exponent": "log_scale"},
    2: {},
}
_KEY = "tnlib"  # of the JSON header among the metadata of the safetensors file
_RESERVED = ("version", "format", "complex", "digest")
_STORED = ("float32", "float64")


def save(path: str | os.PathLike[str], value: Format) -> None:
    """Write `value` to one file, which `load` reads bit for bit; if writing fails, an existing file is unchanged.

    Parameters
    ----------
    path
        The file to write. An existing regular file is replaced and keeps its mode; a symbolic link to one is followed.
    value
        Any format. Of a `Fit`, save its `value`. The gauge that it states is checked, here and by `load`: a train is
        isometric towards its centre, and u and vh of an SVD are isometric, to 1e4 eps.

    Raises
    ------
    ArgumentError
        If the value is not in the gauge that it states, or the file cannot be written.

    Examples
    --------
    >>> import numpy as np, os, tempfile, tnlib
    >>> path = os.path.join(tempfile.mkdtemp(), "ones.safetensors")
    >>> tnlib.save(path, tnlib.tt_svd(np.ones((2, 3))).value)
    >>> tnlib.load(path).ranks
    (1, 1, 1)
    """
    from safetensors.numpy import save as to_bytes

    target, name = as_target("save", path), type(value).__name__
    if not isinstance(value, Format) or format_class(name) is not type(value):
        advice = "register its class" if isinstance(value, Format) else "decompose it first"
        raise wrong_type("save", "value", "a format of tnlib", value, advice)
    refuse_other_arrays("save", "value", value)
    if error := value.gauge_error():
        raise ArgumentError(f"save: value must be in the gauge that it states: {error}; canonicalize it.")
    arrays = value.named_arrays()
    tensors = {key: _as_real(a) for key, a in arrays.items()}
    header = {"version": VERSION, "format": name, **value.attributes()}
    header["complex"] = [key for key, a in arrays.items() if np.iscomplexobj(a)]
    header["digest"] = _digest(header, tensors)
    write_whole(target, to_bytes(tensors, {_KEY: json.dumps(header)}))


def load(path: str | os.PathLike[str]) -> Format:
    """Read the format that `save` of this or an earlier version wrote: bit for bit, centre and scale included.

    Raises
    ------
    FileFormatError, MissingFileError
        If the file is truncated or corrupted (also by a single bit), is not a file of tnlib, has a newer version, or is
        missing.

    Examples
    --------
    >>> import os, tempfile, tnlib
    >>> path = os.path.join(tempfile.mkdtemp(), "train.safetensors")
    >>> tnlib.save(path, tnlib.ones((4, 5, 6)))
    >>> load(path)
    TensorTrain(shape 4 x 5 x 6, ranks (1, 1, 1, 1), 15 parameters, float64)
    """
    from safetensors import SafetensorError, safe_open

    file = as_path("load", "path", path)
    if not file.is_file():
        raise MissingFileError(f"load: path must be a file written by tnlib.save, found none at {file}.")
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            names = opened.keys() if _KEY in metadata else []
            arrays = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as problem:  # dtypes, shapes numpy lacks
        raise FileFormatError(
            f"load: {file} is not a whole safetensors file ({problem}); it may be cut short, save it again."
        ) from None
    if _KEY not in metadata:
        raise FileFormatError(
            f"load: {file} is a safetensors file without a tnlib header; read it with safetensors.numpy."
        )
    try:
        return _build(file, metadata[_KEY], arrays)
    except RecursionError:
        raise _damaged(file, "lists nested too deeply") from None


def _build(file: Path, text: str, stored: Mapping[str, Array]) -> Format:
    header = _header(file, text)
    version, name = header["version"], header["format"]
    if type(version) is not int or version not in _RENAMED:
        raise FileFormatError(
            f"load: {file} has version {version!r}, this tnlib reads versions up to {VERSION}; install a newer tnlib."
        )
    kind = format_class(name) if isinstance(name, str) else None
    if kind is None or not issubclass(kind, Format):
        raise FileFormatError(
            f"load: {file} holds a format {name!r} that this tnlib does not know; install a newer tnlib."
        )
    attributes = {key: x for key, x in header.items() if key not in _RESERVED}
    arrays = _decoded(file, header["complex"], stored)
    try:  # a format takes arrays and attributes as they come; what it cannot use is damage
        value: Format = kind.from_named_arrays(arrays, attributes)
    except TnlibError as problem:
        raise FileFormatError(f"load: {file} does not hold a valid {name}: {problem}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise _damaged(file, f"{type(problem).__name__}: {problem}") from None
    _refuse_unknown(file, "arrays", stored, value.named_arrays())
    expected = [_RENAMED[version].get(key, key) for key in value.attributes()]
    _refuse_unknown(file, "keys", attributes, expected)
    if missing := sorted(set(expected) - attributes.keys()):
        raise _damaged(file, f"no {missing[0]!r}")
    if header["digest"] != _digest({key: x for key, x in header.items() if key != "digest"}, stored):
        raise FileFormatError(f"load: {file} was changed after it was saved; its digest differs, save it again.")
    if error := value.gauge_error():
        raise FileFormatError(f"load: {file} does not hold a valid {name}: {error}; save it again.")
    return value


def _header(file: Path, text: str) -> dict[str, Any]:
    """Return the JSON object of a header, with all keys that every format has."""
    try:
        header = json.loads(text)
    except ValueError as problem:
        raise _damaged(file, str(problem)) from None
    if not isinstance(header, dict):
        raise _damaged(file, f"a {type(header).__name__} in place of an object")
    if missing := [key for key in _RESERVED if key not in header]:
        raise _damaged(file, f"no {missing[0]!r}")
    return header


def _damaged(file: Path, reason: str) -> FileFormatError:
    return FileFormatError(f"load: {file} has a damaged tnlib header ({' '.join(reason.split())}); save it again.")


def _decoded(file: Path, pairs: Any, stored: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of the format: those named in `pairs` are complex."""
    if not isinstance(pairs, list) or not all(isinstance(name, str) and name in stored for name in pairs):
        raise _damaged(file, f"complex must list arrays, got {pairs!r}")
    pairs = set(pairs)
    for name, a in stored.items():
        if a.dtype.name not in _STORED or (name in pairs and a.shape[-1:] != (2,)):
            raise _damaged(file, f"{name} has dtype {a.dtype} and shape {a.shape}")
    return {name: _as_complex(a) if name in pairs else a for name, a in stored.items()}


def _refuse_unknown(file: Path, what: str, names: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise FileFormatError(
            f"load: {file} holds {what} {unknown} that this tnlib does not know; install a newer tnlib."
        )


def _digest(header: Mapping[str, Any], stored: Mapping[str, Array]) -> str:
    """Return 128 bits that depend on every bit of the header and the arrays."""
    state = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(stored):
        a = np.ascontiguousarray(stored[name])
        state.update(json.dumps([name, a.dtype.name, a.shape]).encode())
        state.update(a.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def _as_real(a: Array) -> Array:
    """Return complex data as pairs of reals on a last leg of size 2: safetensors has no 128-bit complex dtype."""
    a = np.ascontiguousarray(a)
    return a.view(a.real.dtype).reshape(*a.shape, 2) if np.iscomplexobj(a) else a


def _as_complex(a: Array) -> Array:
    return np.ascontiguousarray(a).view(np.result_type(a.dtype, np.complex64))[..., 0]
