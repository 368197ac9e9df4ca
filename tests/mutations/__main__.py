"""Command line: apply every mutation to a copy of the tree, run its tests, and print which of them were noticed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LEAST = 48  # of fifty
TIME_LIMIT = 300.0  # seconds for the tests of one mutation; a test that hangs has noticed it
_COPIED = ("tnlib", "adapters", "benchmarks", "tests", "pyproject.toml")
_PASSED, _FAILED = 0, 1  # exit codes of pytest; others mean that it did not run


def position(mutation: Mutation, root: Path = ROOT) -> int:
    """Return the number of the line in its file; raises LookupError unless it is there exactly once."""
    lines = (root / mutation.path).read_text(encoding="utf-8").splitlines()
    found = [k for k, line in enumerate(lines) if line.strip() == mutation.line]
    if len(found) != 1:
        raise LookupError(f"{mutation.path} has this line {len(found)} times: {mutation.line}")
    return found[0]


def is_noticed(mutation: Mutation, root: Path) -> bool:
    """Apply a mutation to the tree at `root`, run its tests, and undo it; True if one of them failed."""
    path = root / mutation.path
    original, k = path.read_text(encoding="utf-8"), position(mutation, root)
    lines = original.splitlines(keepends=True)
    lines[k] = lines[k].replace(mutation.line, mutation.replacement)
    try:
        _write(path, "".join(lines))
        return _run_tests(root, mutation.tests) == _FAILED
    finally:
        _write(path, original)


def _write(path: Path, text: str) -> None:
    """Write a module, and remove its compiled form: the time stamp of a file may not tell two versions apart."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _run_tests(root: Path, tests: Sequence[str]) -> int:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(root / name) for name in ("", "adapters", "tests"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    command += [f"tests/{name}" for name in tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return _FAILED
    if done.returncode not in (_PASSED, _FAILED):
        raise RuntimeError(f"pytest did not run {' '.join(tests)}:\n{done.stdout}{done.stderr}")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutations", description=__doc__)
    parser.add_argument("--only", default="", help="mutations of files whose path contains this")
    chosen = [m for m in MUTATIONS if parser.parse_args().only in m.path]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        tests = sorted({name for mutation in chosen for name in mutation.tests})
        if _run_tests(root, tests) != _PASSED:
            sys.exit("the tests fail without a mutation")
        n_noticed = 0
        for k, mutation in enumerate(chosen, 1):
            start = time.monotonic()
            noticed = is_noticed(mutation, root)
            n_noticed += noticed
            outcome = "noticed" if noticed else "MISSED "
            seconds = f"{time.monotonic() - start:4.0f} s"
            print(f"{k:2} {outcome} {seconds}  {mutation.path}: {mutation.line[:70]}", flush=True)
    print(f"{n_noticed} of {len(chosen)} mutations noticed")
    return int(len(chosen) - n_noticed > len(MUTATIONS) - LEAST)


if __name__ == "__main__":
    sys.exit(main())
