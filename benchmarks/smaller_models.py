"""Layouts that are smaller models, on the built-in Llama: predictions beside the original, and bytes of the KV cache.

    python -m benchmarks.smaller_models [--layout narrow ...] [--write]

Needs a Debian system with its manuals. Calibrates on the 2,400 sentences of `benchmarks.calibrated` with text "both",
and compares predictions on its test sentences: 300 of the manuals and 300 of the Python reference. Prints a Markdown
table row by row; --write puts it into docs/serving.md. Beside `mla` are conversions after two papers
(`published_latents.py`). Takes half an hour on one thread.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import tnlib_adapters
from tnlib_adapters.compression.layouts.layout_table import SMALLER_MODELS
from tnlib_adapters.compression.sizes import cache_bytes

from benchmarks.calibrated import TEST_KINDS, TESTED, calibration_text, folder_of
from benchmarks.published_latents import PAPERS, convert
from benchmarks.texts import sentences

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
HEADINGS = {
    "narrow": "## Smaller sizes: `--layout narrow`",
    "mla": "## One latent for keys and values: `--layout mla`",
}
CASES: dict[str, list[dict[str, int]]] = {  # sizes
    "narrow": [
        {"head_dim": 12},
        {"head_dim": 8},
        {"intermediate_size": 240},
        {"intermediate_size": 160},
        {"head_dim": 12, "intermediate_size": 240},
        {"head_dim": 8, "intermediate_size": 160},
    ],
    "mla": [{"kv_lora_rank": r, "qk_rope_head_dim": 8} for r in (10, 24)],
}
TEXT = "2,400 sentences"
COLUMNS = ("sizes", "text", "numbers of the weights kept", "KV cache, bytes a token")


def row_of(
    layout: str, sizes: dict[str, int], calibration: Path, tests: list[Path], paper: str | None = None
) -> list[str]:
    """Return the cells of one row, of a layout or of a published conversion to it."""
    source = folder_of("llama")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        if paper is None:
            report = tnlib_adapters.compress(source, out, layout=layout, sizes=sizes, calibrate=calibration)
        else:
            report = convert(source, out, paper, sizes, calibration)
        measured = [tnlib_adapters.evaluate(source, out, test).measures() for test in tests]
    by = "" if paper is None else f", by {paper}"
    cells = [", ".join(f"{key} {size}" for key, size in sizes.items()) + by, TEXT]
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


def write_table(layout: str, table: list[str]) -> None:
    """Put a table into the page, in the place of the first one under the heading of its layout."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(k for k in range(lines.index(HEADINGS[layout]), len(lines)) if lines[k].startswith("| sizes |"))
    end = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
    PAGE.write_text("\n".join([*lines[:start], *table, *lines[end:]]) + "\n", encoding="utf-8")


@click.command()
@click.option("--layout", "layouts", type=click.Choice(tuple(SMALLER_MODELS)), multiple=True, default=tuple(CASES))
@click.option("--write", is_flag=True, help="Put the tables into docs/serving.md.")
def main(layouts: tuple[str, ...], write: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calibration, tests = folder / "calibration", [folder / kind for kind in TEST_KINDS]
        calibration.write_text(calibration_text("both", 0), encoding="utf-8")
        for test in tests:
            test.write_text("\n".join(sentences(test.name, TESTED)), encoding="utf-8")
        head = [*COLUMNS, *(f"{kind}: {name}" for kind in TEST_KINDS for name in ("perplexity", "divergence"))]
        for layout in layouts:
            table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
            table.append(f"| {' | '.join(row_of_original(tests))} |")
            for sizes in CASES[layout]:
                for paper in (*PAPERS, None) if layout == "mla" else (None,):
                    table.append(f"| {' | '.join(row_of(layout, sizes, calibration, tests, paper))} |")
                    print(table[-1], flush=True)
            if write:
                write_table(layout, table)


if __name__ == "__main__":
    main()
