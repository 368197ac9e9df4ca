"""Peak memory of the process."""

from __future__ import annotations

from pathlib import Path


def peak_memory() -> int:
    """Return the peak resident set size of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would include the parent process
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line[:5] == "VmHWM") * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, the system without /proc
