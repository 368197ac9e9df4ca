"""Peak memory of tt_svd and tucker beside the input, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
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
