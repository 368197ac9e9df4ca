"""A hundredth of `make fuzz`: the first cases of every reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing.campaign import BAD, Result, fuzz, table
from slow_cases import mostly_slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and opened files are watched as Linux does")

PASSING = {
    "load": 200,
    "claims": 200,
    "safetensors": 300,
    "tokenizer": 300,
    "itensor": 80,
    "tenpy": 60,
    "weights": 40,
    "index": 100,
    "config": 200,
    "integers": 300,
    "statistics": 100,
    "npy": 200,
    "zarr": 60,
    "resume": 150,
}


@pytest.mark.parametrize(
    ("reader", "share"),
    mostly_slow(
        [(reader, share) for share in (0.1, 1.0) for reader in PASSING],
        [("load", 0.1)],
    ),
)
def test_mutated_files_are_read_or_refused(reader: str, share: float) -> None:
    if needed := {"itensor": "h5py", "tenpy": "tenpy", "statistics": "torch", "zarr": "zarr"}.get(reader):
        pytest.importorskip(needed)
    count = int(share * PASSING[reader])
    result = fuzz(reader, count=count)
    assert result.n_files == count
    assert not result.failures, "\n".join([table([result]), *result.failures])
    assert result.outcomes["refused"] > 0.2 * result.n_files


def test_every_reader_is_in_the_command() -> None:
    from fuzzing.__main__ import NAMES
    from fuzzing.readers import READERS

    assert list(READERS) == NAMES


BAD_READERS = """
import sys
from pathlib import Path
import h5py, numpy as np
from fuzzing.readers import Reader
from fuzzing.watch import OpenedOutside
from fuzzing.worker import attempt

inside, outside = map(Path, sys.argv[1:])
watched = OpenedOutside(inside, outside)
readers = {
    "raw": lambda file: {}[file],
    "memory": lambda file: np.ones(1 << 27),
    "python": lambda file: Path("/etc/passwd").read_bytes(),
    "library": lambda file: h5py.File(outside / "secret.h5").close(),
    "good": lambda file: file.read_bytes(),
}
for name, read in readers.items():
    with watched.watch() as found:
        outcome, reason = attempt(Reader([], [], read), inside / "file")
    print(name, outcome, len(found) > 0)
"""


def test_failures_are_noticed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "file").write_bytes(b"abc")
    h5py.File(outside / "secret.h5", "w").close()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = [sys.executable, "-c", BAD_READERS, str(inside), str(outside)]
    done = subprocess.run(code, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        "raw raw False",
        "memory memory False",
        "python read True",
        "library read True",
        "good read False",
    ]


def test_failures_are_counted_and_named_once() -> None:
    result = Result("x")
    for case, kind in enumerate(["read", "refused", *BAD, "raw"]):
        result.add(kind, f"KeyError at a.py:{case % 3}: 'k'" if kind == "raw" else "", case)
    assert result.n_files == 7
    assert result.failures[0] == "x 2: raw, KeyError at a.py:2"
    assert len(result.failures) == len(BAD) + 1
