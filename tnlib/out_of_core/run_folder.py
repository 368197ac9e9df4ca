"""The folder of a run: arrays between two passes, and the state of a pass from which a killed run is resumed.

The state of a pass holds a digest of itself, and checksums of the parts of arrays that were written so far. A pass
whose state or arrays are not as they were left is run again; where its input is gone by then, the folder is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._files import write_whole
from tnlib._typing import Array

_REQUEST = "request.json"
_LOCK = "lock"
_MADE = "made"  # in a folder that did not exist before
_GONE = ".gone"  # in place of an array that is no longer needed: the passes that were finished by then
_DIGEST, _WRITTEN = "digest", "written"  # in the state of a pass


class RunFolder:
    """Files of one decomposition, in a folder of the caller or in a temporary one.

    The files are removed when the decomposition ends. In a folder of the caller they stay if it fails or is killed, and
    the same call goes on from there.

    Parameters
    ----------
    function
        Name for messages.
    folder
        Folder of the caller, which is made if it does not exist; None for a temporary one, made when it is needed.
    request
        What is decomposed and how, as JSON: files of another request are refused.
    """

    def __init__(self, function: str, folder: Any, request: Mapping[str, Any]) -> None:
        self._function = function
        self._folder = None if folder is None else Path(folder)
        self._request = json.dumps(request, sort_keys=True)
        self._made = False  # a temporary folder
        self._lock: Any = None
        self._passes: set[str] = set()  # whose state is in the folder
        self._arrays: dict[str, WrittenArray] = {}
        self.is_resumable = folder is not None

    def __enter__(self) -> Self:
        if self._folder is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(self._unlock)
                self._take_folder(self._folder)
                stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._unlock()
        if self._folder is None or (kind is not None and self.is_resumable):
            return
        if self._made or (self._folder / _MADE).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for file in self._folder.iterdir():
            if file.name.startswith(("array-", "pass-")) or file.name in (_REQUEST, _LOCK):
                file.unlink()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def load(self, name: str) -> dict[str, Array] | None:
        """Return the arrays stored under a name, None where there are none, or others than were stored."""
        if not self.is_resumable:
            return None
        stored = self._as_stored(self._path(f"pass-{name}.npz"))
        markers = self._path("").glob(f"*{_GONE}")
        removed = [file.stem for file in markers if name in file.read_bytes().decode("ascii", "replace").split()]
        if stored is None and removed:
            raise ArgumentError(
                f"{self._function}: storage.folder must hold the files that the interrupted run left, got others in "
                f"{self._folder}, where pass {name} is to be run again and its input, {removed[0]}, was removed; "
                "remove that folder."
            )
        if stored is not None:
            self._passes.add(name)
        return stored

    def _as_stored(self, file: Path) -> dict[str, Array] | None:
        """Return the arrays in a file of `store`, None if they or the arrays that the pass wrote have changed."""
        try:
            with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as opened:
                stored = dict(opened)
            digest, written = bytes(stored.pop(_DIGEST)), json.loads(bytes(stored[_WRITTEN]))
        except Exception:  # missing, written by a machine that lost power, or changed: whatever the parsers raise
            return None
        if digest != self._digest(stored):
            return None
        for name, parts in written.items():
            if (array := self._arrays.get(name)) is not None and not array.holds(parts):
                return None
        stored.pop(_WRITTEN)
        return stored

    def _digest(self, arrays: Mapping[str, Array]) -> bytes:
        state = hashlib.blake2b(self._request.encode(), digest_size=16)
        for name in sorted(arrays):
            a = np.ascontiguousarray(arrays[name])
            state.update(f"{name} {a.dtype.str} {a.shape}".encode())
            state.update(a.reshape(-1).view(np.uint8).data)
        return state.digest()

    def store(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Store arrays under a name; a write that fails leaves the previous ones."""
        written = {key: array.parts for key, array in self._arrays.items()}
        stored = {**arrays, _WRITTEN: np.frombuffer(json.dumps(written).encode(), np.uint8)}
        out = io.BytesIO()
        np.savez(out, **stored, **{_DIGEST: np.frombuffer(self._digest(stored), np.uint8)})  # type: ignore[arg-type]
        with self._disk(out.tell()):
            write_whole(self._path(f"pass-{name}.npz"), out.getvalue())
        self._passes.add(name)

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
        """Return a memory-mapped array of its own file, the one of an earlier run if there is one."""
        file, nbytes = self._path(f"array-{name}.bin"), math.prod(shape) * dtype.itemsize
        if not file.is_file() or file.stat().st_size != nbytes:
            with self._disk(nbytes), file.open("wb") as out:
                _allocate(out, nbytes)
        if not self.is_resumable:
            return np.memmap(file, dtype, "r+", shape=shape)
        array = WrittenArray(file, dtype, "r+", shape=shape)
        array.parts = {}
        if not file.with_suffix(_GONE).exists():
            self._arrays[name] = array
        return array

    def remove(self, a: np.memmap[Any, Any]) -> None:
        """Remove the file of an array; nothing reads it any more."""
        file = Path(str(a.filename))
        self._arrays = {name: array for name, array in self._arrays.items() if array is not a}
        if self.is_resumable:
            with self._disk(0):
                write_whole(file.with_suffix(_GONE), " ".join(sorted(self._passes)).encode())
        file.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if self._folder is None:
            with self._disk(0):
                self._folder, self._made = Path(tempfile.mkdtemp(prefix="tnlib-")), True
        return self._folder / name

    def _take_folder(self, folder: Path) -> None:
        """Make the folder, or check that it holds the files of the same request and no other run works in it."""
        if not folder.exists():
            with self._disk(0):
                folder.mkdir()
                (folder / _MADE).touch()
        elif not folder.is_dir():
            raise ArgumentError(
                f"{self._function}: storage.folder must be a folder, got the file {folder}; pass another."
            )
        request = folder / _REQUEST
        if not request.is_file() and any(file.name not in (_MADE, _LOCK) for file in folder.iterdir()):
            raise ArgumentError(
                f"{self._function}: storage.folder must be an empty folder or that of an interrupted run, got {folder} "
                "with other files; pass another one."
            )
        self._lock = _lock(self._function, folder / _LOCK)
        if not request.is_file():
            with self._disk(0):
                write_whole(request, self._request.encode())
        elif request.read_bytes() != self._request.encode():
            raise ArgumentError(
                f"{self._function}: storage.folder must hold an interrupted run of the same call, got another array "
                f"or other arguments in {folder}; remove that folder or pass another one."
            )

    @contextlib.contextmanager
    def _disk(self, nbytes: int) -> Iterator[None]:
        """Turn a refusal of the file system into one sentence."""
        try:
            yield
        except OSError as problem:
            advice = "pass another folder"
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = "free some space and repeat the call, or pass a folder on another disk"
            where = self._folder or tempfile.gettempdir()
            raise ArgumentError(
                f"{self._function}: storage.folder must have room for {nbytes:,} bytes more, got '{problem.strerror}' "
                f"in {where}; {advice}."
            ) from problem


class WrittenArray(np.memmap):
    """A mapped array of a run that can be resumed, with checksums of its parts as they were written."""

    parts: dict[str, int]  # bounds of a part, as text -> checksum; of parts that were written or verified

    def write(self, index: tuple[slice, ...], values: Array) -> None:
        """Assign a part."""
        self[index] = values
        self.parts[_bounds(index, self.shape)] = _checksum(self[index])

    def holds(self, parts: Mapping[str, int]) -> bool:
        """Test if these parts are as they were written; those that are known to be are not read again."""
        for bounds, checksum in parts.items() - self.parts.items():
            numbers = [int(bound) for bound in bounds.split()]
            index = tuple(slice(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
            if _checksum(self[index]) != checksum:
                return False
            self.parts[bounds] = checksum
        return True


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    return " ".join(
        f"{start} {stop}" for part, n in zip(index, shape, strict=True) for start, stop, _ in (part.indices(n),)
    )


def _checksum(a: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)


def _allocate(out: Any, nbytes: int) -> None:
    """Reserve the blocks of a file: writing to a map of a full disk would kill the process."""
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(out.fileno(), 0, nbytes)
        except OSError:
            out.truncate(0)  # give back what was reserved
            raise
        return
    zeros = bytes(1 << 20)
    for start in range(0, nbytes, len(zeros)):
        out.write(zeros[: nbytes - start])


def _lock(function: str, path: Path) -> Any:
    """Return an open file that other processes cannot lock while it is open."""
    file = path.open("wb")
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ArgumentError(
            f"{function}: storage.folder must not be in use, got {path.parent} in which another process works; "
            "pass another one."
        ) from None
    return file


def release_pages(a: Array) -> None:
    """Drop the pages of a memory-mapped array from resident memory; the file keeps what was written."""
    base: Any = a
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
