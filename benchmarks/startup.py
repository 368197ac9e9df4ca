"""Start-up: whole processes, timed from outside, in turns."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np

_TENSOR = "i = np.arange(20.0); x = 1 / (1 + i[:, None, None, None] + i[:, None, None] + i[:, None] + i); "
PROGRAMS = {
    "python alone": "pass",
    "import numpy": "import numpy",
    "import numpy, tnlib": "import numpy, tnlib",
    "from tnlib import tt_svd": "from tnlib import tt_svd",
    "first small tt_svd (20^4)": f"import numpy as np, tnlib; {_TENSOR}tnlib.tt_svd(x, rtol=1e-6)",
    "first large tt_svd (2^22)": "import numpy as np, tnlib; tnlib.tt_svd(np.ones((2,) * 22), rtol=1e-6)",
}
TURNS = {"full": 9, "small": 2}


def measure(scale: str) -> dict[str, Any]:
    """Return {program: median seconds}; what is compiled lies in the cache, from a turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for turn in range(TURNS[scale] + 1):
        for name, program in PROGRAMS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in seconds.items()}
