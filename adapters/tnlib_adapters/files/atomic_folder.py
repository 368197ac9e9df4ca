"""A folder that appears whole or not at all, and the exchange of two folders in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tnlib import ArgumentError

_LONGEST_NAME = 255  # bytes, of all common file systems
_CURRENT_FOLDER = -100  # AT_FDCWD: paths are as for open
_EXCHANGE = 2  # RENAME_EXCHANGE
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # of file systems and kernels without it


def check_target(function: str, target: Path, source: Path | None, *, force: bool) -> None:
    """Raise unless `target` may become a new folder: before any work, and again by the work itself."""
    name = os.fsencode(target.name)
    if len(name) > _LONGEST_NAME or name.decode("utf-8", "replace").encode() != name:
        raise ArgumentError(
            f"{function}: OUT must have a name in UTF-8 of at most {_LONGEST_NAME} bytes, got {target.name[:80]!r} of "
            f"{len(name)}; choose another."
        )
    if source is not None:
        inside = target.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(target.resolve())
        if inside:
            raise ArgumentError(
                f"{function}: OUT must lie outside IN and not contain it, got {target} and {source}; "
                "choose another folder."
            )
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        kind = "link" if target.is_symlink() else "file"
        raise ArgumentError(
            f"{function}: OUT must be a folder of its own, got the {kind} {target}; choose another name."
        )
    if target.resolve() == Path.cwd():
        raise ArgumentError(f"{function}: OUT must not be the current folder, got {target}; name a new one in it.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ArgumentError(
            f"{function}: OUT must be a new or an empty folder, got {target} with files in it; pass force (--force) to "
            "replace it."
        )
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ArgumentError(f"{function}: the folder that OUT is made in must exist, got {parent}; make it first.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"{function}: OUT must be made in a folder that can be written to, got {parent}.")


def check_text_path(function: str, parameter: str, path: Path) -> None:
    """Raise unless transformers and its tokenizers can read from a path: they pass it on as text in UTF-8."""
    try:
        str(path.absolute()).encode("utf-8")
    except UnicodeEncodeError:
        raise ArgumentError(
            f"{function}: {parameter} must have a path in UTF-8 for transformers to read it, got {str(path)[:200]!r}; "
            "rename the folder, or set a UTF-8 locale."
        ) from None


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Callable[[], Path]]:
    """Yield a function that returns a hidden folder beside `target`, made at its first call and removed at the end.

    On the disk of `target`, because folders for temporary files are often in memory. A process that is killed leaves
    the folder `.<name>.<random>.scratch`.
    """
    scratch = _hidden(target.absolute(), "scratch")

    def folder() -> Path:
        scratch.mkdir(exist_ok=True)
        return scratch

    try:
        yield folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `target` that takes its place at the end, or vanishes on any failure.

    Renaming is the only step that others can see. A process that is killed leaves `target` as it was and, at
    worst, the hidden folder `.<name>.<random>.partial` beside it. An existing `target` and the new folder exchange
    their names in one step, where the system can. Elsewhere `target` is set aside as `.<name>.<random>.old` first and
    removed last: a process killed between the two leaves it under that name.
    """
    target = target.absolute()
    partial = _hidden(target, "partial")
    aside = partial.with_suffix(".old")
    try:
        partial.mkdir()
        yield partial
        _sync(partial)
        _replace(target, partial, aside)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already where all went well


def _hidden(target: Path, kind: str) -> Path:
    """Return the path `.<name>.<random>.<kind>` beside a folder."""
    name = os.fsdecode(os.fsencode(target.name)[:200])  # not too long for the system
    return target.with_name(f".{name}.{secrets.token_hex(8)}.{kind}")


def _replace(target: Path, partial: Path, aside: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(partial, target)  # POSIX replaces an empty folder in the same step
        return
    if exchange(partial, target):
        shutil.rmtree(partial)  # what was there before
        return
    try:
        os.rename(target, aside)
        os.rename(partial, target)
    finally:  # not only after an OSError: a signal may come between the two
        if not partial.exists():
            shutil.rmtree(aside)
        elif aside.exists():
            os.rename(aside, target)


def _sync(folder: Path) -> None:
    """Make sure that what is renamed into place is on the disk, names included."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two existing paths atomically by renameat2 of Linux; False where there is no such call.

    `OSError` if the system knows the call and refuses it.
    """
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if call is None:
        return False
    if call(_CURRENT_FOLDER, os.fsencode(a), _CURRENT_FOLDER, os.fsencode(b), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))
