"""Exchange two folders in one step, where the system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_CURRENT_FOLDER = -100  # AT_FDCWD: paths are as for open
_EXCHANGE = 2  # RENAME_EXCHANGE
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # of file systems and kernels without it


def exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two existing paths atomically by renameat2 of Linux; False where there is no such call.

    Raises
    ------
    OSError
        If the system knows the call and refuses it.
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
