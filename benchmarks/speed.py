"""Seconds: the rounds of test_speed.py put together by entry, and the start-up of whole processes, timed in turns."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import REGISTRY


def measure(scale: str, case: str | None = None) -> dict[str, Any]:
    """Return {"cases": {case: {entry: seconds and results}}, "skipped": {entry: why}}, of one case if it is named."""
    tests = Path(__file__).with_name("test_speed.py")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rounds.json"
        command = [sys.executable, "-m", "pytest", str(tests), "--scale", scale, "--benchmark-json", str(out)]
        command += [] if case is None else ["-k", f"{case}-"]
        # The table that the plugin prints would list every round of every entry.
        done = subprocess.run([*command, "--benchmark-quiet", "--quiet", "-p", "no:cacheprovider"], check=False)
        if done.returncode > 1:
            raise SystemExit(f"pytest stopped with {done.returncode}")
        rounds = json.loads(out.read_text())["benchmarks"]
    return condense(rounds)


def condense(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Collect the rounds that pytest-benchmark wrote, in the order of the registry."""
    timed: dict[str, dict[str, Any]] = {name: {} for name in REGISTRY}
    for one in rounds:
        extra = dict(one["extra_info"])
        case, entry = extra.pop("case"), extra.pop("entry")
        found = timed[case].setdefault(entry, {"seconds": []})
        found["seconds"] += one["stats"]["data"]
        found.update(extra)
    skipped: dict[str, str] = {}
    for name, entries in REGISTRY.items():
        for entry in entries:
            if entry.name in timed[name]:
                timed[name][entry.name]["exact"] = entry.exact
            else:
                skipped[f"{entry.name} in {name}"] = entry.missing() or "it failed"
    return {"cases": {name: found for name, found in timed.items() if found}, "skipped": skipped}


_TENSOR = "i = np.arange(20.0); x = 1 / (1 + i[:, None, None, None] + i[:, None, None] + i[:, None] + i); "
PROGRAMS = {
    "python alone": "pass",
    "import numpy": "import numpy",
    "import numpy, tnlib": "import numpy, tnlib",
    "from tnlib import tt_svd": "from tnlib import tt_svd",
    "first small tt_svd (20^4)": f"import numpy as np, tnlib; {_TENSOR}tnlib.tt_svd(x, rtol=1e-6)",
    "first large tt_svd (2^22)": "import numpy as np, tnlib; tnlib.tt_svd(np.ones((2,) * 22), rtol=1e-6)",
}
# The CPU seconds of the import itself: the difference of two processes is as small as their noise.
_IMPORT = "import time, numpy; start = time.process_time(); import tnlib; print(time.process_time() - start)"
TURNS = {"full": 9, "small": 2}


def measure_startup(scale: str) -> dict[str, Any]:
    """Return {program: median seconds}; what is compiled lies in the cache, from a turn that is not counted.

    Of "import tnlib alone" they are CPU seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in (*PROGRAMS, "import tnlib alone")}
    for turn in range(TURNS[scale] + 1):
        for name, program in PROGRAMS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
        imported = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True)
        seconds["import tnlib alone"] += [float(imported.stdout)] * (turn > 0)
    return {name: float(np.median(found)) for name, found in seconds.items()}
