"""Peak memory of tt_svd and tucker beside the input, and tt_svd of files that exceed its memory limit.

Each run is in a process of its own. Files larger than memory are decomposed in two passes and in one, beside plain
reads of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tnlib
from benchmarks.cases import cases

CASES = {"tt24": "tt_svd", "tucker3": "tucker"}
DTYPES = ("float64", "float32")
# Arrays of 64 kB and more go back to the system when they are freed: what the warm-up took hides nothing.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
CHILD = "import sys; from benchmarks.memory import child; child(*sys.argv[1:])"


def measure(scale: str) -> list[dict[str, Any]]:
    """Return, for each input, its bytes and the bytes that were resident on top of it at the peak."""
    found = []
    for name, function in CASES.items():
        case = cases(scale)[name]
        x = case.make(case)
        options = {"rtol": case.rtol} if function == "tt_svd" else {"ranks": case.rank}
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch) / "x.npy"
                np.save(path, x.astype(dtype))
                command = [sys.executable, "-c", CHILD, str(path), function, json.dumps(options)]
                environment = os.environ | ENVIRONMENT
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            found.append({"case": name, "function": function, "dtype": dtype, **json.loads(done.stdout)})
    return found


def child(path: str, function: str, options: str) -> None:
    """Load, run and print; what was imported, compiled and loaded before is not counted."""
    call, arguments = getattr(tnlib, function), json.loads(options)
    part = np.load(path, mmap_mode="r")
    call(part[0, 0] if part.ndim > 3 else part[: len(part) // 4], **arguments)
    x = np.load(path)
    before = _resident()
    _forget_peak()
    fit = call(x, **arguments)
    peak = _peak()
    result = sum(a.nbytes for a in fit.value.arrays())
    print(json.dumps({"input": x.nbytes, "extra": peak - before - result}))


def _status(key: str) -> int:
    """Bytes that the kernel reports of this process under a key of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {key}")


def _resident() -> int:
    try:
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak() -> int:
    """Peak resident bytes; getrusage alone also counts what the parent held when it forked."""
    try:
        return _status("VmHWM")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# ------------------------------------------------------------------------------------------------- larger than memory

RANK, NOISE, RTOL = 16, 1e-4, 1e-3
LARGEST = {"full": 31, "small": 20}  # binary logarithms of numbers of entries
SMALLER = {"full": (27, 29), "small": (18,)}
MEMORY = {"full": 1 << 30, "small": 1 << 20}
PAST_CHILD = "import sys; from benchmarks.memory import past_child; past_child(*map(int, sys.argv[2:]), sys.argv[1])"
_BUFFER = 1 << 25


def measure_past(scale: str) -> list[dict[str, Any]]:
    """Return, for each size, the seconds of plain reads and of tt_svd, the peaks of resident memory and the errors."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "x.bin"
        write_train(path, LARGEST[scale])
        for e in (*SMALLER[scale], LARGEST[scale]):  # the first entries of a train are one too
            command = [sys.executable, "-c", PAST_CHILD, str(path), str(e), str(MEMORY[scale])]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append({"entries": 1 << e, "memory": MEMORY[scale], **json.loads(done.stdout)})
    return found


def write_train(path: Path, e: int) -> None:
    """Write 2^e float64, a train of rank 16 on legs of size 2 plus normally distributed noise, in blocks."""
    rng = np.random.default_rng(0)
    left, right = _side(rng, e // 2), _side(rng, e - e // 2)
    right = right.reshape((2,) * (e - e // 2) + (-1,)).T.reshape(right.shape[1], -1)  # the bond first
    norm = np.linalg.norm(np.linalg.qr(left, mode="r") @ np.linalg.qr(right.T, mode="r").T)
    rows = max(1, (1 << 22) // right.shape[1])
    with path.open("wb") as out:
        for i in range(0, len(left), rows):
            block = left[i : i + rows] @ right
            (block + NOISE * norm / 2 ** (e / 2) * rng.standard_normal(block.shape)).tofile(out)


def _side(rng: np.random.Generator, n_legs: int) -> np.ndarray:
    """The first legs of a random train as a matrix (2^n, 16)."""
    out = np.ones((1, 1))
    for _ in range(n_legs):
        core = rng.standard_normal((out.shape[1], 2, min(RANK, 2 * out.shape[1])))
        out = np.tensordot(out, core / np.linalg.norm(core), 1).reshape(-1, core.shape[2])
    return out


def past_child(e: int, memory: int, path: str) -> None:
    """Read the file twice and decompose it, both from the disk at first and then from what is in the page cache."""
    tnlib.tt_svd(np.random.default_rng(0).standard_normal((2,) * 18), rtol=0.5)  # compiles
    x = np.memmap(path, np.float64, "r", shape=(2,) * e)
    reads = []
    for k in range(2):
        if k == 0:
            _forget(path)
        start = time.perf_counter()
        _read(path, x.nbytes)
        reads.append(time.perf_counter() - start)
    _forget(path)
    start = time.perf_counter()
    fit = tnlib.tt_svd(x, rtol=RTOL, storage=tnlib.Storage(memory=memory))
    seconds = time.perf_counter() - start
    peak = _peak()
    _forget(path)
    start = time.perf_counter()
    one_pass = tnlib.Storage(memory=memory, one_pass=True)
    once = tnlib.tt_svd(x, rtol=RTOL, max_rank=RANK, storage=one_pass)
    print(json.dumps({
        "bytes": x.nbytes, "reads": reads, "seconds": seconds, "peak": peak,
        "error": fit.error, "rank": max(fit.value.ranks),
        "one pass": time.perf_counter() - start, "one pass peak": _peak(), "estimate": once.error,
    }))  # fmt: skip


def _read(path: str, n_bytes: int) -> None:
    buffer = bytearray(_BUFFER)
    with open(path, "rb", buffering=0) as file:
        while n_bytes > 0 and (count := file.readinto(memoryview(buffer)[: min(_BUFFER, n_bytes)])):
            n_bytes -= count


def _forget(path: str) -> None:
    """Drop a file from the page cache, where the system can."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
