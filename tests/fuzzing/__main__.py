"""Command line: fuzz readers for some time, print a table, and exit with 1 if one of them failed."""

from __future__ import annotations

import argparse
import sys

from .campaign import fuzz, table

NAMES = ["load", "claims", "safetensors", "tokenizer", "itensor", "tenpy", "weights", "index", "config", "integers"]
NAMES += ["statistics", "npy", "zarr", "resume"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all readers together; default: %(default)s")
    parser.add_argument("--reader", action="append", choices=NAMES, help="default: all of them")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of every reader")
    parser.add_argument("--count", type=int, default=0, help="this many cases of every reader, in place of a time")
    options = parser.parse_args()
    names = options.reader or NAMES
    results = []
    for name in names:
        seconds = None if options.count else options.seconds / len(names)
        results.append(fuzz(name, seconds=seconds, first=options.first, count=options.count))
        print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))
    failures = [failure for result in results for failure in result.failures]
    print(*failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
