"""Atomic writing of files."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path` and rename it, so that `path` is never a partial file.

    A symbolic link stays one: the file that it leads to is replaced. An existing file keeps its mode.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".tnlib.{secrets.token_hex(8)}.tmp")  # path.name may be as long as names can be
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    try:
        with temporary.open("xb") as out:
            if mode is not None:
                temporary.chmod(mode)  # before the data are in it
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # left over only where writing or renaming failed
