"""Child process: read mutated files of one reader, one line of JSON on stdout before and after each.

A case is its number: the number and the name of the reader determine the sample and the mutation.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import tnlib

from .mutations import mutate_bytes
from .readers import READERS, Reader
from .watch import OpenedOutside, limited_memory

LONGEST_MESSAGE = 1000


def run(name: str, first: int, count: int | None) -> None:
    """Read the cases first, first + 1, ...; without a count until the process is killed."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        inside, outside = Path(place, "inside"), Path(place, "outside")
        inside.mkdir()
        outside.mkdir()
        _write_secrets(outside)
        reader = READERS[name](inside, outside)
        originals = {file: file.read_bytes() for file in reader.samples}
        for file in reader.samples:  # imports and compiles, and shows that the samples are valid
            reader.read(file)
        opened = OpenedOutside(inside, outside)
        say(ready=True)
        for number in itertools.count(first) if count is None else range(first, first + count):
            file = reader.samples[number % len(reader.samples)]
            file.write_bytes(mutated(name, number, reader, originals[file]))
            say(case=number)
            with opened.watch() as found:
                outcome, reason = attempt(reader, file)
            if found:
                say(case=number, outcome="outside", reason=found[0])
            say(case=number, outcome=outcome, reason=reason)
            file.write_bytes(originals[file])


def mutated(name: str, number: int, reader: Reader, content: bytes) -> bytes:
    """Return the content of a case."""
    rng = Random(f"{name} {number}")
    mutation = rng.choice(reader.mutations)
    try:
        return mutation(rng, content)
    except Exception:  # a mutation that cannot be made, by h5py or of a file that has become no JSON
        return mutate_bytes(rng, content)


def attempt(reader: Reader, file: Path) -> tuple[str, str]:
    """Return how a reader takes a file, and why if it is not as it should be."""
    try:
        with limited_memory(file.stat().st_size):
            reader.read(file)
    except tnlib.TnlibError as problem:
        if len(str(problem)) > LONGEST_MESSAGE:
            return "raw", f"a message of {len(str(problem)):,} characters"
        return "refused", ""
    except MemoryError as problem:
        return "memory", where(problem)
    except BaseException as problem:  # a panic of a Rust library is no Exception
        if isinstance(problem, KeyboardInterrupt):
            raise
        return "raw", where(problem)
    return "read", ""


def where(problem: BaseException) -> str:
    """Return the kind of an exception, the innermost line of ours, and its message."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "tnlib" in Path(f.filename).parts[-4:-1]
              or "tnlib_adapters" in f.filename or "fuzzing" in f.filename]  # fmt: skip
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(problem).__name__} at {place}: {str(problem)[:120]!r}"


def _write_secrets(outside: Path) -> None:
    (outside / "secret.bin").write_bytes(bytes(1000))
    try:
        import h5py
    except ImportError:
        return
    with h5py.File(outside / "secret.h5", "w") as opened:
        opened["x"] = np.ones(4)


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None)
