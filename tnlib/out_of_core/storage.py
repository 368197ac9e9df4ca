"""Storage settings of large arrays: memory limit, folder of a resumable run, workers, number of reads."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import as_flag, as_path, as_real

_TILE = 1 << 25  # bytes; a fixed size, so that results do not depend on the memory that is free
_TILE_OF_WORKERS = 1 << 26  # bytes; a task costs about a millisecond
_MOST_OF_WORKERS = 1 << 32  # bytes
_UNKNOWN = 1 << 32  # bytes that count as free where the system does not say


@dataclass(frozen=True)
class Storage:
    """Settings for arrays that may exceed memory, the argument `storage` of decompositions.

    Parameters
    ----------
    memory
        Memory limit in bytes, for tiles, sums and projected arrays together; a quarter of the free memory if None. An
        array in memory is read by tiles only if a limit is passed.
    folder
        Folder for the state of the run, from which the same call resumes after an interruption; it is removed when the
        call succeeds. If None, a temporary one for intermediate arrays.
    client
        distributed.Client whose workers read the array and compute on its chunks; `memory` is then the limit of every
        process, at most 4 GiB if None. If None, a dask.array is computed by the client that its `compute()` would use,
        or by this process if there is none.
    one_pass
        Read the array once, for slow storage, in double precision. Needs `max_rank`, which determines the sketches; the
        error is estimated, and `rtol` applies to the estimate. A `SlabStream` is always read once.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> x = np.ones((64, 64, 64))
    >>> tnlib.tt_svd(x, rtol=1e-6, storage=tnlib.Storage(memory=2**21)).value.ranks
    (1, 1, 1, 1)
    """

    memory: float | None = None
    folder: str | os.PathLike[str] | None = None
    client: Any = None
    one_pass: bool = False

    def __post_init__(self) -> None:
        if self.memory is not None:
            total = as_real("Storage", "memory", self.memory, "memory=2**30")
            if not 1 << 16 <= total < math.inf:
                raise ArgumentError(
                    f"Storage: memory must be a number of bytes from 65536 up, got {self.memory}; pass for example "
                    "memory=2**30."
                )
        if self.folder is not None:
            as_path("Storage", "folder", self.folder)
        if self.client is not None:
            _check_client(self.client)
        if as_flag("Storage", "one_pass", self.one_pass):
            for name in ("folder", "client"):
                if getattr(self, name) is not None:
                    raise ArgumentError(
                        f"Storage: {name} must be left out with one_pass and for a SlabStream, got "
                        f"{getattr(self, name)!r:.80}; what is read once is neither stored nor distributed."
                    )

    def limit(self, *, for_workers: bool = False) -> MemoryLimit:
        """Return the memory limit; None is a quarter of the free memory, at most 4 GiB a worker."""
        if self.memory is not None:
            return MemoryLimit(int(self.memory), for_workers=for_workers)
        free = free_memory() // 4
        return MemoryLimit(min(free, _MOST_OF_WORKERS) if for_workers else free, for_workers=for_workers)


def as_storage(function: str, storage: Any) -> Storage:
    """Return the argument `storage`, by default one without settings."""
    if storage is None:
        return Storage()
    if not isinstance(storage, Storage):
        raise ArgumentTypeError(
            f"{function}: storage must be a tnlib.Storage, got {storage!r:.80}; pass for example "
            "storage=tnlib.Storage(memory=2**30)."
        )
    return storage


def is_client(value: Any) -> bool:
    """Test if `value` is a Dask client, without importing Dask."""
    if "distributed" not in sys.modules:  # then nobody can have one
        return False
    from distributed import Client

    return isinstance(value, Client)


def _check_client(client: Any) -> None:
    if not is_client(client):
        raise ArgumentTypeError(
            f"Storage: client must be a distributed.Client, got a {type(client).__name__}; pass for example "
            "distributed.Client('tcp://10.0.0.1:8786')."
        )
    if client.asynchronous:
        raise ArgumentError(
            "Storage: client must be synchronous, got one of an event loop; open it without asynchronous=True."
        )


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

    def largest_gram(self, dtype: np.dtype[Any]) -> int:
        """Return the largest size of a Gram matrix of an array of `dtype`, of which a sum holds a dozen."""
        return math.isqrt(self.sums // (12 * np.result_type(dtype, np.float64).itemsize))

    def holds(self, nbytes: int) -> bool:
        """Test if an array of this size is to be decomposed in memory, with the copies that this takes."""
        return 3 * nbytes <= self.total


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
