"""Layouts that are smaller models, on the built-in Llama: predictions beside the original, and bytes of the KV cache.

    python -m benchmarks.smaller_models [--layout narrow ...] [--write]

Needs a Debian system with its manuals. Calibrates on the 2,400 sentences of `benchmarks.calibrated` with text "both",
and compares predictions on its test sentences: 300 of the manuals and 300 of the Python reference. Prints a Markdown
table row by row; --write puts it into docs/serving.md. Beside `mla` are conversions after two papers
(`convert`). Takes half an hour on one thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import tnlib_adapters
from tnlib_adapters.compression.layouts.latent_factors import LatentFactors
from tnlib_adapters.compression.layouts.latent_layers import LatentLayers
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest
from tnlib_adapters.compression.layouts.layout_table import SMALLER_MODELS, Layout
from tnlib_adapters.compression.layouts.mla import MlaModel
from tnlib_adapters.compression.layouts.write_smaller import write_smaller
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.report.report import Report
from tnlib_adapters.compression.request import Request, quiet
from tnlib_adapters.compression.sizes import cache_bytes

from benchmarks.calibrated import TEST_KINDS, TESTED, calibration_text, folder_of
from benchmarks.texts import sentences
from tnlib._typing import Array

# Training-free conversions to multi-head latent attention after two papers.
#
# Both make the same kind of model (`MlaModel`) as the layout, without a fit.
#
# TransMLA (Meng et al., arXiv 2502.07864): F neighbouring rotary planes count as of one frequency (FreqFold). An
# orthogonal matrix, the principal components of the keys of all key-value heads in these planes, rotates real and
# imaginary parts alike (RoRoPE); F / C components stay rotary, at every C-th frequency of the model, so that
# qk_rope_head_dim = head_dim / C. The other keys, divided by the ratio of their norm to that of the values (balanced
# keys and values), and the values are projected together onto the principal components of their activations. F is
# chosen on held-out batches.
#
# CARE (Zhou et al., arXiv 2603.17946): the same rotary planes; the other keys and the values are factored by the
# singular values of C^1/2 [W_K, W_V], C the second moments of the inputs, damped by a tenth of their mean. The ranks
# of the layers, with the same sum, are raised one by one where the next squared singular value is the largest share
# of what is left; ranks that are equal are the alternative, and the better one on held-out batches is taken. Layers
# of smaller rank are padded with zeros, because config.json states one rank.

_DAMPING = {"TransMLA": 0.01, "CARE": 0.1}  # of a mean second moment


class _PublishedLayers(LatentLayers):
    """Layers converted by one of the papers; see the module."""

    def __init__(self, paper: str, checkpoint: Any, rank: int, n_rotated: int, workspace: Workspace) -> None:
        super().__init__(checkpoint, rank, n_rotated, workspace)
        self._paper, self._fold = paper, 1
        self._ranks = [rank] * checkpoint.n_layers

    def fit(self, model: Any, streams: Any, _n_steps: int, _progress: Any) -> Iterator[Any]:
        """Choose the number of planes that are folded, and the ranks, and yield the layers as they are."""
        from tnlib_adapters.instrument.latent_fit import truncated_divergence

        planes, kept = len(self._radians), self._n_rotated // 2
        folds = [f for f in (2**e for e in range(planes.bit_length())) if f % (planes // kept) == 0 and f <= planes]
        tried = []
        for fold in folds:
            self._fold = fold
            equal = [self._rank] * len(self._ranks)
            for ranks in (equal, self._adjusted_ranks()) if self._paper == "CARE" else (equal,):
                self._ranks = ranks
                divergence = truncated_divergence(model, streams, self.shape(self.base), self.start)
                tried.append((divergence, fold, ranks))
        _, self._fold, self._ranks = min(tried)
        yield from map(self.start, range(len(self._ranks)))

    def shape(self, base: float) -> Any:
        """Return the sizes of the attention, for the largest rank."""
        return replace(super().shape(base), rank=max(self._ranks))

    def _factors(self, k: int, _base: float) -> LatentFactors:
        sizes = self._checkpoint.sizes
        projections, moments = self._checkpoint.projections(k), self._layer_moments(k).inputs
        queries, keys, values = (projections.weights[name].astype(float) for name in "qkv")
        rotated, shared, keys = self._rotary_planes(queries, keys, moments)
        down, right = self._joint(keys, values, moments, self._ranks[k])
        padding = max(self._ranks) - self._ranks[k]
        down, right = np.pad(down, ((0, 0), (0, padding))), np.pad(right, ((0, padding), (0, 0)))
        split = np.split(right, [keys.shape[1]], axis=1)
        up = np.concatenate([part.reshape(len(right), sizes.kv_heads, -1) for part in split], -1)
        return LatentFactors(
            np.concatenate([queries.reshape(sizes.d_model, sizes.n_heads, -1), rotated], -1),
            np.concatenate([down, shared], -1),
            np.repeat(up, sizes.n_heads // sizes.kv_heads, axis=1),
        )

    def _rotary_planes(self, queries: Array, keys: Array, moments: Array) -> tuple[Array, Array, Array]:
        """Return the rotary parts of queries (d_model, heads, P) and of the key (d_model, P), and the other keys."""
        sizes, n = self._checkpoint.sizes, len(self._radians)
        by_head = [a.reshape(sizes.d_model, -1, sizes.d_head) for a in (queries, keys)]
        q, k = (a[..., :n] + 1j * a[..., n : 2 * n] for a in by_head)
        q = q.reshape(sizes.d_model, sizes.kv_heads, -1, n)
        rotated, shared, per_fold = [], [], self._fold * self._n_rotated // 2 // n
        for first in range(0, n, self._fold):
            group = slice(first, first + self._fold)
            own = k[:, :, group].reshape(sizes.d_model, -1)
            basis = np.linalg.eigh(_damped((own.conj().T @ moments @ own).real, 0.01))[1][:, ::-1][:, :per_fold]
            for u in basis.T:
                key = own @ u
                by_group = u.reshape(sizes.kv_heads, -1)
                rotated.append(np.einsum("dghf,gf->dgh", q[..., group], by_group).reshape(sizes.d_model, -1))
                shared.append(key)
                k[:, :, group] -= key[:, None, None] * by_group
        new = by_head[1].copy()
        new[..., :n], new[..., n : 2 * n] = k.real, k.imag
        return _pairs(np.stack(rotated, -1)), _pairs(np.stack(shared, -1)), new.reshape(keys.shape)

    def _joint(self, keys: Array, values: Array, moments: Array, rank: int) -> tuple[Array, Array]:
        """Return the factors (d_model, rank) and (rank, keys and values)."""
        both = np.concatenate([keys, values], 1)
        if self._paper == "CARE":
            root = _root(_damped(moments, _DAMPING["CARE"]))
            u, s, vh = np.linalg.svd(root @ both, full_matrices=False)
            return np.linalg.solve(root, u[:, :rank] * s[:rank]), vh[:rank]
        norms = [np.sqrt(np.einsum("di,de,ei->i", w, moments, w)).mean() for w in (keys, values)]
        scale = np.repeat([norms[0] / norms[1] or 1.0, 1.0], [keys.shape[1], values.shape[1]])
        balanced = both / scale
        basis = np.linalg.eigh(_damped(balanced.T @ moments @ balanced, _DAMPING["TransMLA"]))[1][:, ::-1][:, :rank]
        return balanced @ basis, basis.T * scale

    def _adjusted_ranks(self) -> list[int]:
        """Return ranks of the same sum, raised one by one by the share of what is left."""
        squares = []
        for k in range(len(self._ranks)):
            projections, moments = self._checkpoint.projections(k), self._layer_moments(k).inputs
            keys = self._rotary_planes(*(projections.weights[name].astype(float) for name in "qk"), moments)[2]
            both = np.concatenate([keys, projections.weights["v"]], 1)
            root = _root(_damped(moments, _DAMPING["CARE"]))
            squares.append(np.linalg.svd(root @ both, compute_uv=False) ** 2)
        ranks = [max(1, self._rank // 2)] * len(squares)
        while sum(ranks) < self._rank * len(squares):
            shares = [s[r] / s[r:].sum() if r < len(s) else 0.0 for s, r in zip(squares, ranks, strict=True)]
            ranks[int(np.argmax(shares))] += 1
        return ranks


def _damped(moments: Array, damping: float) -> Array:
    return moments + damping * np.trace(moments) / len(moments) * np.eye(len(moments))


def _root(moments: Array) -> Array:
    values, vectors = np.linalg.eigh(moments)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def _pairs(planes: Array) -> Array:
    return np.stack([planes.real, planes.imag], -1).reshape(*planes.shape[:-1], -1)


class _Published(MlaModel):
    """A model converted by one of the papers."""

    paper: str

    def layers(self, workspace: Workspace) -> _PublishedLayers:
        """Return the layers, to be chosen."""
        return _PublishedLayers(self.paper, self._checkpoint, self._rank, self._rotated, workspace)

    def config(self, layers: LatentLayers) -> dict[str, Any]:
        """Return the content of config.json, with the largest rank."""
        self._rank = layers.shape(layers.base).rank
        return super().config(layers)

    def tensors(self, k: int, layers: LatentLayers, products: Any) -> dict[str, Array]:
        """Return the tensors of layer k, with the largest rank."""
        self._rank = layers.shape(layers.base).rank
        return super().tensors(k, layers, products)


class TransMlaModel(_Published):
    paper = "TransMLA"


class CareModel(_Published):
    paper = "CARE"


PAPERS = {model.paper: model for model in (TransMlaModel, CareModel)}


def convert(source: str | os.PathLike[str], out: Path, paper: str, sizes: dict[str, int], text: Path) -> Report:
    """Write a model converted by the paper."""
    row = Layout(
        name="mla",
        writes="",
        takes="",
        sizes=tuple(sizes),
        make=f"{__name__}:{PAPERS[paper].__name__}",
    )
    defaults = {field.name: field.default for field in fields(Request)}
    request = LayoutRequest(row, sizes, Request.of(**defaults | {"keep": 1.0, "method": "", "calibrate": text}))
    return write_smaller(source, out, request, force=False, progress=quiet)


# --------------------------------------------------------------------------------------------------------- the tables

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
