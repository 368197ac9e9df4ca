"""Runs test_speed.py and puts the rounds of each entry together."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import REGISTRY


def measure(scale: str) -> dict[str, Any]:
    """Return {"cases": {case: {entry: seconds and results}}, "skipped": {entry: why}}."""
    tests = Path(__file__).with_name("test_speed.py")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rounds.json"
        command = [sys.executable, "-m", "pytest", str(tests), "--scale", scale, "--benchmark-json", str(out)]
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
