"""The layout `narrow` on the built-in Llama: predictions beside the original, and bytes of the KV cache.

    python -m benchmarks.narrow_models [--write]

Needs a Debian system with its manuals. Calibrates on the 2,400 sentences of `benchmarks.calibrated` with text "both",
and compares predictions on its test sentences: 300 of the manuals and 300 of the Python reference. Prints a Markdown
table row by row; --write puts it into docs/serving.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import tnlib_adapters
from tnlib_adapters import Budget
from tnlib_adapters.compression.sizes import cache_bytes

from benchmarks.calibrated import TEST_KINDS, TESTED, calibration_text, folder_of
from benchmarks.texts import sentences

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
SIZES: list[dict[str, int]] = [
    {"head_dim": 12},
    {"head_dim": 8},
    {"intermediate_size": 240},
    {"intermediate_size": 160},
    {"head_dim": 12, "intermediate_size": 240},
    {"head_dim": 8, "intermediate_size": 160},
]
TEXT = "2,400 sentences"
COLUMNS = ("sizes", "text", "numbers of the weights kept", "KV cache, bytes a token")


def row_of(sizes: dict[str, int], calibration: Path, tests: list[Path]) -> list[str]:
    """Return the cells of the row of a narrow model."""
    source = folder_of("llama")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        report = tnlib_adapters.compress(source, out, Budget(sizes=sizes), calibration=calibration, layout="narrow")
        measured = [tnlib_adapters.evaluate(source, out, test).measures() for test in tests]
    cells = [", ".join(f"{key} {size}" for key, size in sizes.items()), TEXT]
    cells += [f"{report.kept:.2f}", f"{report.cache_bytes['after']:,} of {report.cache_bytes['before']:,}"]
    for measures in measured:
        cells += [f"{measures['perplexity, after']:.2f}", f"{measures['divergence (nats a token)']:.4f}"]
    return cells


def row_of_original(tests: list[Path]) -> list[str]:
    """Return the cells of the original."""
    source = folder_of("llama")
    cache = cache_bytes(tnlib_adapters.open_checkpoint(source))
    cells = ["original", "", "1.00", f"{cache:,} of {cache:,}"]
    for test in tests:
        cells += [f"{tnlib_adapters.evaluate(source, source, test).measures()['perplexity, before']:.2f}", "0"]
    return cells


def write_table(table: list[str]) -> None:
    """Put the table into the page, in the place of the old one."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("| sizes |"))
    end = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
    PAGE.write_text("\n".join([*lines[:start], *table, *lines[end:]]) + "\n", encoding="utf-8")


@click.command()
@click.option("--write", is_flag=True, help="Put the table into docs/serving.md.")
def main(write: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calibration, tests = folder / "calibration", [folder / kind for kind in TEST_KINDS]
        calibration.write_text(calibration_text("both", 0), encoding="utf-8")
        for test in tests:
            test.write_text("\n".join(sentences(test.name, TESTED)), encoding="utf-8")
        head = [*COLUMNS, *(f"{kind}: {name}" for kind in TEST_KINDS for name in ("perplexity", "divergence"))]
        table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        table.append(f"| {' | '.join(row_of_original(tests))} |")
        for sizes in SIZES:
            table.append(f"| {' | '.join(row_of(sizes, calibration, tests))} |")
            print(table[-1], flush=True)
        if write:
            write_table(table)


if __name__ == "__main__":
    main()
