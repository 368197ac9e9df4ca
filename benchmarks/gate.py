"""Time everyday operations and five large cases beside another commit, and fail where one takes 1.5 times as long.

    python -m benchmarks.gate --base COMMIT

Both trees run in processes of their own, in turn, so that a busy machine slows both; the ratio is the median of all
turns. What is too slow is measured again with more turns before it fails.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import median

import click

from benchmarks.gate_cases import everyday, large

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.5
TURNS, MORE_TURNS = 5, 15


class Tree:
    """A process that times cases with the library at `root`."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join([str(root), str(root / "adapters")])
        environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "benchmarks" / "gate_cases.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        )

    def seconds(self, case: str) -> float:
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise click.ClickException(f"the process that timed {case!r} ended")
        return float(json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def ratio(new: Tree, old: Tree, case: str, turns: int) -> tuple[float, float]:
    """Return the median ratio of the times of both trees, and the median time of the new one."""
    pairs = []
    for turn in range(turns):
        first, second = (new, old) if turn % 2 else (old, new)
        times = {first: first.seconds(case), second: second.seconds(case)}
        pairs.append((times[new] / times[old], times[new]))
    return median(r for r, _ in pairs), median(t for _, t in pairs)


def extract(commit: str, folder: Path) -> None:
    """Write the packages of a commit into a folder."""
    command = ["git", "archive", commit, "tnlib", "adapters"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(folder, filter="data")


@click.command()
@click.option("--base", required=True, help="Commit or tag that is compared with.")
def main(base: str) -> None:
    slow = []
    with tempfile.TemporaryDirectory() as folder:
        extract(base, Path(folder))
        new, old = trees = Tree(ROOT), Tree(Path(folder))
        try:
            for case in (*everyday(), *large()):
                value, time = ratio(new, old, case, TURNS)
                if value > LIMIT:
                    value, time = ratio(new, old, case, MORE_TURNS)
                slow += [case] if value > LIMIT else []
                print(f"{case:30} {1e3 * time:10.2f} ms {value:8.2f} of {base}", flush=True)
        finally:
            for tree in trees:
                tree.close()
    if slow:
        raise click.ClickException(f"more than {LIMIT} times as slow as {base}: {', '.join(slow)}")


if __name__ == "__main__":
    main()
