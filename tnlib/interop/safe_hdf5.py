"""Open HDF5 files of unknown origin and write them: every access is checked, and nothing outside the file is read.

HDF5 follows external links, external storage and virtual datasets into other files, fills datasets that the file does
not hold, and inflates a chunk to any size, whatever size the dataset declares. Here a dataset is read only if it lies
in the file, and if all that is read takes at most ten times the size of the file. Errors of h5py are reported as a
damaged file at the call that raises them, so that a defect of the readers cannot be taken for one.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from tnlib._errors import FileFormatError, MissingFileError
from tnlib._files import write_whole
from tnlib._typing import Array
from tnlib._validate import as_path, as_target, import_optional

_FREE = 1 << 23  # bytes that a file of any size may take
_STORED_RATIO = 10  # bytes of all datasets that are read, per byte of the file
# Bytes of dense tensors per byte of the file: blocks of one charge fill 1/4 to 1/5 of a tensor, of two charges 1/7.
_DENSE_RATIO = 16
_DEFLATE_RATIO = 1032  # the most that deflate can reach
_LONGEST_ATTRIBUTE = 1 << 16
_MAX_NDIM = 32
_HEAP = b"GCOL\x01\x00\x00\x00"  # signature and version of a global heap, where strings of variable length lie
_REMEDY = "it is damaged or of another kind, save it again"


@dataclass
class _Allowance:
    """Bytes that may still be read, and made dense; whether the heaps were checked."""

    stored: int
    dense: int
    has_sound_heaps: bool = False


class HDF5Item:
    """A group or dataset of an open HDF5 file."""

    def __init__(self, function: str, file: Path, item: Any, name: str, allowance: _Allowance) -> None:
        self._function, self._file, self._item, self._allowance = function, file, item, allowance
        self.name = name

    def refuse(self, expected: str, got: str, remedy: str = _REMEDY) -> NoReturn:
        """Raise a FileFormatError that names the file and the place in it."""
        raise FileFormatError(f"{self._function}: {self.name} in {self._file} {expected}, got {got}; {remedy}.")

    def names(self) -> list[str]:
        """Return the names of the children, links included; none for a dataset."""
        import h5py

        with _damage(self._function, self._file):
            return list(self._item) if isinstance(self._item, h5py.Group) else []

    def holds(self, name: str) -> bool:
        """Test if the group has a child of this name that lies in the file itself."""
        from h5py import h5l

        return bool(self._link_type(name) == h5l.TYPE_HARD)

    def child(self, name: str) -> HDF5Item:
        """Return a group or dataset of this group; links and data in other files are refused."""
        from h5py import h5l

        link_type, item = self._link_type(name), None
        if link_type is None:
            self.refuse(f"must hold {name!r}", "no such thing", "pass the name of another object, or save it again")
        if link_type == h5l.TYPE_HARD:
            with _damage(self._function, self._file):
                item = self._item[name]
                item = item if _is_inside(item) else None
        if item is None:
            self.refuse(f"must hold {name!r} itself", "a link to elsewhere", "copy what it leads to into the file")
        return HDF5Item(self._function, self._file, item, f"{self.name.rstrip('/')}/{name}", self._allowance)

    def _link_type(self, name: str) -> int | None:
        """Return the type of a link, without opening what it leads to; None if there is none."""
        import h5py

        raw = name.encode(errors="surrogateescape")
        if not isinstance(self._item, h5py.Group) or "/" in name or not name.strip(".") or b"\0" in raw:
            return None
        with _damage(self._function, self._file):
            links = self._item.id.links
            return int(links.get_info(raw).type) if links.exists(raw) else None

    def attribute(self, name: str) -> str | int | float | complex | None:
        """Return a string or number stored as an attribute, None if there is none."""
        with _damage(self._function, self._file):
            stored = self._item.attrs.get_id(name) if name in self._item.attrs else None
            shape, dtype = (None, None) if stored is None else (stored.shape, stored.dtype)
        if dtype is None:
            return None
        if shape != () or not (_is_text(dtype) or dtype.kind in "biufc") or dtype.itemsize > _LONGEST_ATTRIBUTE:
            self.refuse(f"must have one string or number as its attribute {name!r}", f"{dtype} of shape {shape}")
        self._check_heaps(dtype)
        with _damage(self._function, self._file):
            value = self._item.attrs[name]
        return _as_str(value) if isinstance(value, bytes | str) else value.item()

    def text_attribute(self, name: str, default: str) -> str:
        """Return a string stored as an attribute."""
        value = self.attribute(name)
        if not isinstance(value, str | None):
            self.refuse(f"must have a string as its attribute {name!r}", repr(value))
        return default if value is None else value

    def integer_attribute(self, name: str, default: int | None = None) -> int:
        """Return an integer stored as an attribute."""
        value = self.attribute(name)
        value = default if value is None else value
        if not isinstance(value, int):
            self.refuse(f"must have an integer as its attribute {name!r}", "none" if value is None else repr(value))
        return value

    def text(self) -> str:
        """Return the string stored as a dataset."""
        dtype, shape = self._check_dataset()
        if shape != () or not _is_text(dtype):
            self.refuse("must hold one string", f"{dtype} of shape {shape}")
        self._check_heaps(dtype)
        with _damage(self._function, self._file):
            return _as_str(self._item[()])

    def numbers(self, kinds: str = "biufc") -> Array:
        """Return the numbers stored as a dataset, whose dtype has one of the `kinds` of numpy."""
        dtype, shape = self._check_dataset()
        if shape is None or dtype.kind not in kinds:
            self.refuse("must hold numbers of the kind that is expected there", f"{dtype} of shape {shape}")
        with _damage(self._function, self._file):
            return np.asarray(self._item[()])

    def integer(self) -> int:
        """Return the integer stored as a dataset."""
        value = self.numbers()
        if value.size != 1 or value.dtype.kind not in "iu":
            self.refuse("must hold one integer", f"{value.dtype} of shape {value.shape}")
        return int(value.reshape(()))

    def check_dense(self, shape: Sequence[int], dtype: DTypeLike) -> None:
        """Raise unless a dense array of this shape is one that a file of this size can need."""
        if len(shape) > _MAX_NDIM:
            self.refuse(f"must have at most {_MAX_NDIM} legs", str(len(shape)))
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if n_bytes > self._allowance.dense:
            self.refuse(
                f"must have at most {self._allowance.dense:,} bytes when it is dense, as a file of this size may",
                f"{n_bytes:,}",
                "truncate the state first",
            )
        self._allowance.dense -= n_bytes

    def _check_heaps(self, dtype: np.dtype[Any]) -> None:
        """Raise if strings of this dtype lie in heaps that HDF5 would read without end."""
        if dtype.kind != "O" or self._allowance.has_sound_heaps:
            return
        with _damage(self._function, self._file):
            _, size_of_lengths = self._item.file.id.get_create_plist().get_sizes()
        if _has_endless_heap(self._file, size_of_lengths):
            self.refuse("must lie in a file with sound heaps", "an empty object in one", "save it again")
        self._allowance.has_sound_heaps = True

    def _check_dataset(self) -> tuple[np.dtype[Any], tuple[int, ...] | None]:
        """Return dtype and shape of a dataset that the file can hold."""
        import h5py
        from h5py import h5d

        if not isinstance(self._item, h5py.Dataset):
            self.refuse("must be a dataset", "a group")
        with _damage(self._function, self._file):
            dtype, shape = self._item.dtype, self._item.shape
            properties = self._item.id.get_create_plist()
            is_chunked = properties.get_layout() == h5d.CHUNKED
            stored = self._item.id.get_storage_size()
        n_bytes = dtype.itemsize * math.prod(shape or ())
        if shape is not None and n_bytes > stored * (_DEFLATE_RATIO if is_chunked else 1):
            self.refuse(f"must hold no more than its {stored:,} bytes in the file can", f"{n_bytes:,}", "it is damaged")
        self._spend(n_bytes)
        if is_chunked and n_bytes:
            self._check_chunks(properties, dtype)
        return dtype, shape

    def _check_chunks(self, properties: Any, dtype: np.dtype[Any]) -> None:
        """Raise if a chunk has another size than the dataset says: HDF5 inflates it whatever it becomes."""
        from h5py import h5z

        with _damage(self._function, self._file):
            filters = [properties.get_filter(k)[0] for k in range(properties.get_nfilters())]
            n_bytes = math.prod(properties.get_chunk()) * dtype.itemsize
            chunks: list[Any] = []
            self._item.id.chunk_iter(chunks.append)
        known = {h5z.FILTER_DEFLATE, h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}
        if not known.issuperset(filters) or len(set(filters)) != len(filters):
            self.refuse(
                "must be stored as it is, or by deflate", f"the filters {filters}", "save it without compression"
            )
        self._spend(n_bytes)
        if h5z.FILTER_DEFLATE not in filters:
            return
        bit = 1 << filters.index(h5z.FILTER_DEFLATE)
        for chunk in chunks:
            if chunk.size > self._file.stat().st_size:
                self.refuse("must have chunks that lie in the file", f"one of {chunk.size:,} bytes")
            with _damage(self._function, self._file):
                mask, raw = self._item.id.read_direct_chunk(chunk.chunk_offset)
            if not mask & bit and _inflates_beyond(raw, n_bytes + 4):  # with the checksum of fletcher32
                self.refuse(f"must have chunks of {n_bytes:,} bytes", "more")

    def _spend(self, n_bytes: int) -> None:
        if n_bytes > self._allowance.stored:
            self.refuse(
                f"must hold at most {self._allowance.stored:,} bytes, as a file of this size may",
                f"{n_bytes:,}",
                "save it without compression",
            )
        self._allowance.stored -= n_bytes


@contextmanager
def open_hdf5(function: str, path: str | os.PathLike[str]) -> Iterator[HDF5Item]:
    """Yield the root of an HDF5 file; `function` is the prefix of error messages."""
    file = as_path(function, "path", path)
    h5py = import_optional(function, "h5py", "h5py")
    if not file.is_file():  # a pipe would be waited for
        raise MissingFileError(f"{function}: path must be an HDF5 file, found none at {file}.")
    with _damage(function, file):
        opened = h5py.File(file, "r")
    with opened:
        size = file.stat().st_size
        yield HDF5Item(
            function, file, opened, "/", _Allowance(_FREE + _STORED_RATIO * size, _FREE + _DENSE_RATIO * size)
        )


def write_hdf5(function: str, path: str | os.PathLike[str], fill: Callable[[Any], None]) -> None:
    """Write atomically an HDF5 file with the contents that `fill` adds to an empty h5py.File."""
    target = as_target(function, path)
    h5py = import_optional(function, "h5py", "h5py")
    with h5py.File("in memory", "w", driver="core", backing_store=False) as file_in_memory:
        fill(file_in_memory)
        file_in_memory.flush()
        image = file_in_memory.id.get_file_image()
    write_whole(target, image)


@contextmanager
def _damage(function: str, file: Path) -> Iterator[None]:
    """Report an error of h5py as a damaged file; the block calls h5py alone."""
    try:
        yield
    except PermissionError:
        raise
    except (OSError, RuntimeError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError) as problem:
        reason = " ".join(str(problem).split()).strip("'\"")
        raise FileFormatError(
            f"{function}: {file} is damaged or not an HDF5 file of this kind ({type(problem).__name__}: {reason}); "
            "it may be cut short, save it again."
        ) from None


def _is_inside(item: Any) -> bool:
    """Test if an object has no data in other files."""
    import h5py
    from h5py import h5d

    if not isinstance(item, h5py.Dataset):
        return isinstance(item, h5py.Group)
    properties = item.id.get_create_plist()
    return bool(properties.get_layout() != h5d.VIRTUAL and properties.get_external_count() == 0)


def _is_text(dtype: np.dtype[Any]) -> bool:
    import h5py

    return h5py.check_string_dtype(dtype) is not None


def _as_str(stored: bytes | str) -> str:
    """Return an HDF5 string as str; h5py returns some of them with surrogates for bytes that are no UTF-8."""
    raw = stored if isinstance(stored, bytes) else stored.encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace")


def _has_endless_heap(file: Path, size_of_lengths: int) -> bool:
    """Test for a global heap with free space of 0 bytes, behind which HDF5 looks for the next object for ever.

    An object has an index of 2 bytes (0: free space), 6 other bytes, its size, and its data in multiples of 8 bytes;
    the size of free space counts all of these.
    """
    header = 8 + size_of_lengths
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        n_left = len(data) // header  # objects in heaps that do not overlap
        start = data.find(_HEAP)
        while start >= 0:
            end = start + int.from_bytes(data[start + 8 : start + header], "little")
            offset = start + header
            while offset + header <= min(end, len(data)):
                size = int.from_bytes(data[offset + 8 : offset + header], "little")
                n_bytes = header + -(-size // 8) * 8 if any(data[offset : offset + 2]) else size
                n_left -= 1
                if n_bytes == 0 or n_left < 0:
                    return True
                offset += n_bytes
            start = data.find(_HEAP, start + 1)
    return False


def _inflates_beyond(raw: bytes, limit: int) -> bool:
    """Test if a zlib stream has more than `limit` bytes, without holding them all."""
    stream, total = zlib.decompressobj(), 0
    try:
        while raw and total <= limit:
            total += len(stream.decompress(raw, 1 << 20))
            raw = stream.unconsumed_tail
    except zlib.error:
        return False  # HDF5 will refuse it
    return total > limit
