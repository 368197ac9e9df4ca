"""The memory limit of a decomposition: its default, and the parts of it that tiles, sums and arrays may take."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

from tnlib._errors import ArgumentError
from tnlib._validate import as_real

_TILE = 1 << 25  # bytes; a fixed size, so that results do not depend on the memory that is free
_TILE_OF_WORKERS = 1 << 26  # bytes; a task costs about a millisecond
_MOST_OF_WORKERS = 1 << 32  # bytes
_UNKNOWN = 1 << 32  # bytes that count as free where the system does not say


class MemoryLimit:
    """Bytes that a decomposition may hold in a process, and how they are divided."""

    def __init__(self, total: int, *, for_workers: bool = False) -> None:
        self.total, self._for_workers = total, for_workers

    @property
    def tile(self) -> int:
        """Bytes of a tile; two are read, and a few copies of one are in use."""
        return max(1 << 12, min(_TILE_OF_WORKERS if self._for_workers else _TILE, self.total // 16))

    @property
    def largest_tile(self) -> int:
        """Bytes of a tile that must hold whole chunks or legs."""
        return self.total // 6

    @property
    def array(self) -> int:
        """Bytes up to which a projected array is decomposed in memory."""
        return self.total // 4

    @property
    def sums(self) -> int:
        """Bytes of the partial sums of a pass."""
        return self.total // 4

    def largest_gram(self, itemsize: int) -> int:
        """Return the largest size of a Gram matrix, of which a sum holds a dozen."""
        return math.isqrt(self.sums // (12 * itemsize))

    def holds(self, nbytes: int) -> bool:
        """Test if an array of this size is to be decomposed in memory, with the copies that this takes."""
        return 3 * nbytes <= self.total


def as_memory(function: str, memory: Any, *, for_workers: bool = False) -> MemoryLimit:
    """Return the limit from a number of bytes; None is a quarter of the free memory, at most 4 GiB a worker."""
    if memory is None:
        free = free_memory() // 4
        return MemoryLimit(min(free, _MOST_OF_WORKERS) if for_workers else free, for_workers=for_workers)
    total = as_real(function, "memory", memory, "memory=2**30")
    if not 1 << 16 <= total < math.inf:
        raise ArgumentError(
            f"{function}: memory must be a number of bytes from 65536 up, got {memory}; pass for example memory=2**30."
        )
    return MemoryLimit(int(total), for_workers=for_workers)


def free_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of its control group."""
    candidates = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        candidates += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        candidates.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not candidates and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        candidates.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(1 << 20, min(candidates, default=_UNKNOWN))
