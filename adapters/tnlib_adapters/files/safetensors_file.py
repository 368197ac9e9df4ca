"""One safetensors file: its header checked before it is believed, its tensors read one at a time.

Layout: eight bytes of header length (little endian), that many bytes of JSON, then the data. The JSON maps a
name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the end of the header, and
"__metadata__" to strings. The safetensors package reads such files too, but not BF16 with numpy alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.files.json_file import LARGEST_JSON, parse_json

# safetensors name -> how numpy holds the same bytes
STORED_AS = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
FLOATS = ("F16", "BF16", "F32", "F64")  # narrowest first
_MOST_LEGS = 32  # of a numpy array before version 2
_LARGEST_SHAPE = 2**59  # numbers of eight bytes that numpy can address


@dataclass(frozen=True)
class TensorInfo:
    """File, byte range, dtype and shape of a stored tensor."""

    file: Path
    name: str
    dtype: str  # as safetensors writes it: "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int  # in bytes from the start of the file
    end: int

    @property
    def size(self) -> int:
        """Count of numbers."""
        return math.prod(self.shape)

    @property
    def float_dtype(self) -> str:
        """Dtype of its floats, in which numbers that replace it are stored."""
        return self.dtype

    def read_stored(self) -> Array:
        """Read the numbers as stored; BF16 comes as its uint16 bit patterns."""
        flat = np.empty(self.size, STORED_AS[self.dtype])
        with self.file.open("rb") as opened:  # numpy.fromfile loses an interrupt that comes while it opens a file
            opened.seek(self.begin)
            n_read = opened.readinto(flat.view(np.uint8).data)
        if n_read != flat.nbytes:
            raise FileFormatError(
                f"open_checkpoint: {self.file} ends inside tensor {self.name!r}; it was cut short, copy it again."
            )
        return flat.reshape(self.shape)

    def read(self) -> Array:
        """Read the numbers; both half precisions come as float32."""
        return decode(self.read_stored(), self.dtype)

    def read_finite(self) -> Array:
        """Read the numbers, refusing NaN and inf."""
        values = self.read()
        check_finite(self.name, self.file, values)
        return values

    def read_part(self, index: tuple[slice, ...]) -> Array:
        """Read the numbers of some rows and columns alone, refusing NaN and inf; half precision comes as float32."""
        if self.file.stat().st_size < self.end:
            raise FileFormatError(
                f"open_checkpoint: {self.file} ends inside tensor {self.name!r}; it was cut short, copy it again."
            )
        # a plain array over the mapping, or every part of it would be a memmap as well
        stored = np.asarray(np.memmap(self.file, STORED_AS[self.dtype], "r", self.begin, self.shape))
        part = decode(np.array(stored[index]), self.dtype)
        check_finite(self.name, self.file, part)
        return part


class ComputedTensor(TensorInfo):
    """A tensor that is computed from others whenever it is read."""

    def read_part(self, index: tuple[slice, ...]) -> Array:
        """Compute all numbers, refusing NaN and inf, and return some rows and columns."""
        return self.read_finite()[index]


def widest_float(tensors: Iterable[TensorInfo]) -> str:
    """Return the widest dtype of tensors of floats, in which the tensors that replace them are stored."""
    return max((info.float_dtype for info in tensors), key=FLOATS.index)


def decode(stored: Array, dtype: str) -> Array:
    """Return the numbers that a safetensors dtype stands for; both half precisions come as float32."""
    if dtype == "BF16":
        return from_bf16(stored)
    return stored.astype(np.float32) if dtype == "F16" else stored


def check_finite(name: str, file: Path, values: Array) -> None:
    """Raise if a float tensor holds NaN or inf."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} in {file} must be finite, got {values[where]} at index {where}; "
            "repair the weights before working with them."
        )


def encode(values: Array, dtype: str) -> Array:
    """Return `values` as the bytes of a safetensors dtype hold them, rounded to nearest, ties to even."""
    return to_bf16(values) if dtype == "BF16" else np.asarray(values).astype(STORED_AS[dtype])


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, or raise `FileFormatError` saying what is wrong."""
    total = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(total - 8, LARGEST_JSON):
            raise _damaged(file, f"its header claims {length:,} bytes, the file has {total:,}")
        raw = opened.read(length)
    if raw[:1] != b"{":
        raise _damaged(file, "its header is no JSON object")
    try:
        header = parse_json(raw)
    except ValueError as problem:
        raise _damaged(file, f"its header is no JSON ({problem})") from None

    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "its metadata are no JSON object of strings")
    start = 8 + length
    tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items()}
    _check_extents(file, tensors.values(), start, total)
    return tensors, metadata


def _tensor(file: Path, name: str, entry: Any, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(file, f"tensor {name!r} lacks dtype, shape or two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in STORED_AS:
        raise _damaged(file, f"tensor {name!r} has dtype {dtype!r:.40}; known are {', '.join(STORED_AS)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in [*shape, begin, end]):
        raise _damaged(file, f"tensor {name!r} has shape {shape!r:.80} and offsets {begin!r:.40}, {end!r:.40}")
    # Only a tensor of size 0 can get here with such a shape: its bytes do not give it away.
    if len(shape) > _MOST_LEGS or math.prod(max(n, 1) for n in shape) > _LARGEST_SHAPE:
        raise _damaged(file, f"tensor {name!r} has shape {shape!r:.80}, which no array can have")
    expected = math.prod(shape) * STORED_AS[dtype].itemsize
    if end - begin != expected:
        raise _damaged(file, f"tensor {name!r} of shape {shape} in {dtype} needs {expected} bytes, has {end - begin}")
    return TensorInfo(file, name, dtype, tuple(shape), start + begin, start + end)


def _check_extents(file: Path, tensors: Iterable[TensorInfo], start: int, total: int) -> None:
    """Raise unless the tensors fill the file without overlap and without gaps."""
    reached, previous = start, "the header"
    for tensor in sorted(tensors, key=lambda one: (one.begin, one.end)):
        if tensor.begin < reached:
            raise _damaged(file, f"tensor {tensor.name!r} overlaps {previous}")
        if tensor.end > total:
            raise _damaged(file, f"tensor {tensor.name!r} ends at byte {tensor.end:,} of {total:,}")
        if tensor.begin > reached:
            raise _damaged(file, f"{tensor.begin - reached:,} bytes before tensor {tensor.name!r} belong to no tensor")
        reached, previous = tensor.end, f"tensor {tensor.name!r}"
    if reached != total:
        raise _damaged(file, f"its last {total - reached:,} bytes belong to no tensor")


def _damaged(file: Path, what: str) -> FileFormatError:
    return FileFormatError(f"open_checkpoint: {file} is no whole safetensors file: {what}; copy or convert it again.")


class Entry(NamedTuple):
    """A tensor to be written: `values` holds the bytes of `dtype` (see `encode`)."""

    name: str
    dtype: str
    values: Array | TensorInfo  # a TensorInfo is read only when its turn comes

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.values.shape) * STORED_AS[self.dtype].itemsize

    def read(self) -> Array:
        """Return the values, read from their file if they are in one."""
        return self.values.read_stored() if isinstance(self.values, TensorInfo) else self.values


def write_tensor_file(file: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> Iterator[str]:
    """Write a safetensors file, one tensor in memory at a time; yields the name of each tensor once written.

    A generator, so that the caller can show progress: nothing is written until it is iterated to its end.
    """
    listed = list(entries)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for entry in listed:
        end = begin + entry.n_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.values.shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # data start at a multiple of eight bytes
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little"))
        out.write(raw)
        for entry in listed:
            out.write(np.ascontiguousarray(entry.read()).data)
            yield entry.name


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the float32 values of bfloat16 bit patterns, exactly.

    >>> from_bf16(np.array([0x3F80, 0xC000], np.uint16))
    array([ 1., -2.], dtype=float32)
    """
    wide = np.asarray(bits).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def to_bf16(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 bit patterns nearest to `values`, ties to even; NaN stays NaN.

    >>> [hex(int(b)) for b in to_bf16(np.array([1.0, 1.00390625, 1.01171875], np.float32))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    # Half of the last kept bit, less one where that bit is 0, so that a tie rounds to an even pattern.
    rounded = np.right_shift(bits, 16, out=np.empty_like(bits))
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    is_nan = np.isnan(values)
    rounded[is_nan] = (bits[is_nan] >> 16) | np.uint32(0x0040)
    return rounded.astype(np.uint16)


# --------------------------------------------------------------------------------------------------------- digests

_DIGEST = "digest"


def write_digested(file: Path, metadata: Mapping[str, str], entries: Sequence[Entry]) -> None:
    """Write a file with a digest of its contents atomically, replacing the previous one."""
    hidden = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    try:
        for _ in write_tensor_file(hidden, entries, {**metadata, _DIGEST: _digest(metadata, entries)}):
            pass
        hidden.replace(file)
    finally:
        hidden.unlink(missing_ok=True)


def is_as_written(file: Path) -> bool:
    """Test if a file holds what `write_digested` wrote."""
    tensors, metadata = read_header(file)
    entries = [Entry(info.name, info.dtype, info) for info in tensors.values()]
    return metadata.get(_DIGEST) == _digest(metadata, entries)


def _digest(metadata: Mapping[str, str], entries: Sequence[Entry]) -> str:
    """Return a digest of the metadata, but for the digest itself, and of all arrays by name."""
    state = hashlib.sha256(repr(sorted((k, v) for k, v in metadata.items() if k != _DIGEST)).encode())
    for entry in sorted(entries, key=lambda entry: entry.name):
        values = entry.read()
        state.update(f"{entry.name} {values.dtype.str} {values.shape}".encode())
        state.update(np.ascontiguousarray(values).data)
    return state.hexdigest()
