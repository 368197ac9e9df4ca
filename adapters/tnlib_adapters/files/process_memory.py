"""Memory of this process: what it holds, and by default may hold of a running model."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

BATCH_TOKENS = 1024  # products run at full speed, and a short text still gives many batches
WEIGHTS = 1 << 30  # bytes of weights in float32
LARGE_TABLE = 2**24  # parameters of an embedding or unembedding of which no array in double precision is made


def peak_memory() -> int:
    """Return the peak resident set size of this process, in bytes."""
    return _of_status("VmHWM") or _peak_of_usage()  # getrusage would include the parent process


def resident_memory() -> int:
    """Return the resident set size of this process, in bytes; its peak where the system does not state it."""
    return _of_status("VmRSS") or _peak_of_usage()


def release_free_memory() -> None:
    """Return memory that is free to the system: arrays of some megabytes leave gaps that glibc keeps."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in other C libraries
        if trim is not None:
            trim(0)


def _of_status(name: str) -> int:
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    return next((int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name)), 0) * 1024


def _peak_of_usage() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, the system without /proc
