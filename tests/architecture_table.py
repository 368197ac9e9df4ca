"""Measures every row of the table of architectures against transformers, and writes docs/architectures.md.

    python tests/architecture_table.py [PAGE]

A cell is the largest error over layers and heads, relative to the largest entry, of models in single precision; or
the reason why there is none. `MEASURES` holds one function per column.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
import transformers_models as models
from attention_layers import from_the_diagonal, homogeneous, mask_of, scores_of
from tnlib_adapters import (
    Attention,
    Checkpoint,
    choose_gauge,
    fix_gauge,
    fold,
    open_checkpoint,
    rotate,
    save_checkpoint,
)
from tnlib_adapters.compression.compress import factorise
from tnlib_adapters.compression.methods.method_table import METHODS
from tnlib_adapters.compression.write import write_checkpoint
from tnlib_adapters.reference.model import run
from tnlib_adapters.transformers_plugin import FactoredLinear

from tnlib import ArgumentError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
GREEN = 1e-5  # single precision through two layers
Cell = float | str  # an error, or the reason why there is none


@dataclass(frozen=True)
class Case:
    """A small random model, the folder it was saved to, and what it computed."""

    model: Any
    checkpoint: Checkpoint
    ran: models.Recorded

    def layers(self) -> Iterator[tuple[Attention, list[np.ndarray]]]:
        """Every layer beside scores, patterns, inputs of queries and of keys, and outputs of the first sequence."""
        ran = self.ran
        for i, of_layer in enumerate(zip(ran.scores, ran.patterns, ran.inputs, ran.read, ran.outputs, strict=True)):
            yield self.checkpoint.attention(i), [a[0] for a in of_layer]


def make_case(name: str, folder: Path) -> Case:
    model = models.random_model(name)
    model.save_pretrained(folder)
    return Case(model, open_checkpoint(folder), models.record(model, models.inputs(model)))


def off(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def scores(case: Case) -> Cell:
    worst = 0.0
    for layer, (theirs, _, x, read, _) in case.layers():
        seen = mask_of(layer, x, read)
        ours, theirs = scores_of(layer, x, read), from_the_diagonal(layer, theirs)
        worst = max(worst, *(off(o[seen], t[seen]) for o, t in zip(ours, theirs, strict=True)))
    return worst


def forms(case: Case) -> Cell:
    """Scores from qk(head, distance) alone."""
    worst = 0.0
    for layer, (_, _, x, read, _) in case.layers():
        if not layer.is_bilinear:
            return "not bilinear"
        x1, read1 = homogeneous(x).astype(np.float64), homogeneous(read).astype(np.float64)
        distance = np.arange(len(x))[:, None] - np.arange(len(read))
        theirs = scores_of(layer, x.astype(np.float64), read.astype(np.float64))
        for head in range(layer.n_heads):
            ours = np.zeros(distance.shape)
            for far in np.unique(distance):
                ours = np.where(distance == far, layer.scale * x1 @ layer.qk(head, int(far)).full() @ read1.T, ours)
            ours = ours if layer.softcap is None else layer.softcap * np.tanh(ours / layer.softcap)
            worst = max(worst, off(ours, theirs[head]))
    return worst


def outputs(case: Case) -> Cell:
    frozen = ((layer.frozen(a, divisors=layer.value_divisors(x)), x, y) for layer, (_, a, _, x, y) in case.layers())
    return max(off(layer.apply(x), y) for layer, x, y in frozen)


def in_memory(case: Case) -> Cell:
    pairs = ((layer, Attention.from_module(case.model, i)) for i, (layer, _) in enumerate(case.layers()))
    return max(off(getattr(a, w), getattr(b, w)) for a, b in pairs for w in ("W_Q", "W_K", "W_V", "W_O"))


def forward(case: Case) -> Cell:
    got = run(case.checkpoint, case.ran.tokens, case.ran.decoder_tokens)
    if case.ran.logits is not None and got.logits is not None:
        return off(got.logits, case.ran.logits)
    return off(got.hidden, case.ran.hidden)


def folded(case: Case) -> Cell:
    """What transformers computes from the folded checkpoint."""
    return reloaded(case, fold(case.checkpoint).checkpoint)


def rotated(case: Case) -> Cell:
    """The same in a rotated basis of the stream; where LayerNorm stands, one that keeps the vector of ones."""
    checkpoint = fold(case.checkpoint).checkpoint
    d = checkpoint.sizes.d_model
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    if checkpoint.architecture.norm == "layer":
        basis = np.linalg.qr(np.column_stack([np.ones(d), rng.standard_normal((d, d - 1))]))[0]
        inner = np.eye(d)
        inner[1:, 1:] = np.linalg.qr(rng.standard_normal((d - 1, d - 1)))[0]
        turn = basis @ inner @ basis.T
    try:
        found = rotate(checkpoint, turn)
    except ArgumentError as refused:
        return "norms stay" if "weights of a norm" in str(refused) else "other parts"
    return reloaded(case, found, turn)


def reloaded(case: Case, checkpoint: Checkpoint, turn: np.ndarray | None = None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(checkpoint, Path(folder) / "out")
        model = models.loaded_like(case.model, Path(folder) / "out")
        ran = models.record(model, case.ran.tokens)
    if case.ran.logits is not None:
        return off(ran.logits, case.ran.logits)
    return off(ran.hidden, case.ran.hidden if turn is None else case.ran.hidden @ turn)


def gauge(case: Case) -> Cell:
    """The same with the gauge of every head fixed, and heads in their own order."""
    if has_latent_vectors(case):
        return "latent"
    return reloaded(case, fix_gauge(case.checkpoint))


def chosen(case: Case) -> Cell:
    """The same in the basis that is chosen for rounding, after the unembedding is untied."""
    return reloaded(case, choose_gauge(fold(case.checkpoint).checkpoint).checkpoint)


def has_latent_vectors(case: Case) -> bool:
    return case.checkpoint.attention(0).latent_norm is not None


def compressed(case: Case) -> Cell:
    """What transformers computes from factors that stay factored, beside the weights they multiply out to."""
    sizes, latent = case.checkpoint.sizes, has_latent_vectors(case)
    methods = [
        n for n, row in METHODS.items() if not (row.unit == "layer" and latent) and not row.reason_to_refuse(sizes)
    ]
    return float(np.max([compressed_by(case, method) for method in methods]))


def compressed_by(case: Case, method: str) -> float:
    plan = factorise(case.checkpoint, method).plan(0.5)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("factored", "dense"):
            out = Path(folder) / layout
            out.mkdir()
            for _ in write_checkpoint(case.checkpoint, plan, layout, out):
                pass
            model = models.loaded_like(case.model, out)
            n_factored = sum(isinstance(module, FactoredLinear) for module in model.modules())
            if layout == "factored" and n_factored <= case.checkpoint.n_layers:
                raise AssertionError(f"{n_factored} factored layers in {type(model).__name__}")
            found.append(models.outputs(model, case.ran.tokens))
    return off(*found)


MEASURES: Mapping[str, Callable[[Case], Cell]] = {
    "scores": scores,
    "forms": forms,
    "outputs": outputs,
    "in memory": in_memory,
    "forward": forward,
    "folded": folded,
    "rotated": rotated,
    "gauge": gauge,
    "chosen": chosen,
    "reload": compressed,
}


def shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return "equal" if cell == 0 else f"{cell:.0e}" if cell < GREEN else f"**{cell:.0e}**"


def heads(layer: Attention) -> str:
    on = "" if layer.kv_heads == layer.n_heads else f" on {layer.kv_heads}"
    return f"{layer.n_heads}{on}, of {layer.d_head}"


def positions(case: Case, layer: Attention) -> str:
    if layer.rotary is not None:
        told = case.model.config.to_dict().get("rope_parameters") or {}
        kind = told.get("rope_type", "default")
        part = "" if layer.rotary.n_columns == layer.d_head else f", {layer.rotary.n_columns} columns"
        return f"rotary{'' if kind == 'default' else ' ' + kind}{part}{', in pairs' if layer.rotary.pairs else ''}"
    if layer.relative_bias is not None:
        return f"relative bias, {layer.relative_bias.table.shape[1]} bins"
    return "learned" if layer.alibi is None else "ALiBi"


def besides(case: Case) -> str:
    all_layers = [layer for layer, _ in case.layers()]
    windows = {layer.window for layer in all_layers}
    said = {
        "biases": any(layer.b_K is not None for layer in all_layers),
        "QK norm": any(layer.head_norm is not None for layer in all_layers),
        f"values of {all_layers[0].d_value}": all_layers[0].d_value != all_layers[0].d_head,
        "soft cap": any(layer.softcap is not None for layer in all_layers),
        "window": windows == {*windows} - {None},
        "window in some layers": None in windows and len(windows) > 1,
        "no mask": not all_layers[0].causal,
        "a decoder with cross-attention": any(layer.cross for layer in all_layers),
    }
    return ", ".join(what for what, holds in said.items() if holds)


TEXT = """# Architectures

Written by `python tests/architecture_table.py`; the numbers are not edited by hand.

`open_checkpoint(folder).attention(layer)` and `Attention.from_module(model, layer)` support the architectures below,
under their names in transformers 4 and 5; [Choose](choose.md#architectures-and-commands) has them by the names of
models on the hub, with the commands that take them. Each is one row of `architectures/table.py`. Every row of the table
below is a test against a small model of transformers {version} with random weights, biases and norms, run with hooks.
An error is the largest over layers and heads, relative to the largest entry, in single precision. The first columns of
the table use these terms:

- "4 on 2, of 6": 4 query heads share 2 key and value heads, of width 6; "values of 5": values have the width 5
- "4 columns": rotary embeddings rotate only 4 columns of a head; "in pairs": they rotate adjacent columns, where other
  models rotate column k with column k + width / 2
- "window": causal attention to a window of the last positions; "no mask": attention to all positions; "12 bins":
  distances are divided into 12 bins

The other columns are errors:

- **scores**: `Attention.scores`, with positions, norms and soft caps, at all pairs of positions that the mask admits
- **forms**: the same scores from `qk(head, distance)`, one bilinear form per distance; "not bilinear" if queries and
  keys are normalised
- **outputs**: `frozen(patterns)` with the model's attention patterns
- **in memory**: weights of `Attention.from_module` compared with those of the saved folder
- **forward**: logits, or hidden states, of `tnlib_adapters.reference.run`
- **folded**: logits of transformers, for a folder with norms and value biases folded
- **rotated**: the same with the residual stream in another basis; "norms stay" if a norm cannot be folded, "other
  parts" if parts of the model that tnlib does not know, such as a pooler, read the stream
- **gauge**: the same for the unfolded model with the gauge and the order of its heads fixed; "latent" if attention on
  latent vectors has no such form
- **chosen**: the same for the folded model in the basis of `choose_gauge`, which takes the freedoms that a model has
- **reload**: logits of the model compressed to one half and loaded as factors, compared with those of the same model
  with the factors multiplied out; the largest error of all methods of `tnlib compress`
"""

NOTES = """
## Positions

- **Rotary embeddings**: `qk(head)` without a distance is refused. `qk(head, distance)` is exact at any distance,
  `qk_tensor(head, distances)` returns several distances in Tucker form, and `plane=` selects one frequency. Variants:
  default, linear, dynamic, YaRN with its attention factor, Llama 3, longrope. If frequencies depend on the sequence
  length (dynamic, longrope), pass `length=`; the default is for sequences no longer than the training context.
- **Relative biases** (T5) add a learned number per binned distance to a score, and one to the rank, as ALiBi does. In a
  decoder all bins are for keys before the query.
- **ALiBi** subtracts slope times distance from a score. transformers adds slope times the position of the key instead,
  which shifts all scores of a query by the same amount; softmax is invariant to this shift.
- In transformers, eager attention of Falcon adds ALiBi twice. The row in the table is for its default attention, which
  adds it once, and rounds slope times position to bfloat16: exact for the heads in the table. tnlib does not round.

## Heads

- **Normalised queries and keys** (Qwen3) have no bilinear form: `qk` raises an error, and `numerator()` returns the
  layer without the division by their norms. `scores` always applies soft caps (Gemma 2).
- **Latent vectors** (DeepSeek): queries, keys and values are computed from normalised low-rank vectors. `qk` and `ov`
  raise an error, and `frozen` requires the divisors, `value_divisors(x)`.
- **Grouped-query attention**: `qk_group` and `ov_group` return the forms of all query heads that share a key and value
  head, with the shared weights as one factor.
- `head(layer, head)` of a checkpoint reads one head only.

## T5 with a decoder

The layers of the encoder come first. A block of the decoder is two layers: self-attention, then cross-attention, whose
queries read the stream of the decoder and whose keys and values read the output of the encoder, without positional
terms. `scores(x, memory)` takes both inputs, and `qk` and `ov` are bilinear forms of both. `run` takes
`decoder_tokens`. Both streams share one embedding, and `rotate` rotates both. Functions that follow one stream from
layer to layer (circuits, `inspect`) or run a text (`evaluate`, `--calibrate`) accept the encoder alone.

## Folding, rotating, gauges

- `rotate` is refused where the weights of a norm cannot be folded: norms on the stream itself (BERT, OPT with norms
  after the sublayers, the embedding norm of BLOOM), norms on the output of a sublayer (Gemma 2), and a final norm whose
  output is read by no weight that tnlib knows. It is also refused if parts that tnlib does not know, such as poolers,
  read the stream.
- `fix_gauge` maps all models that differ only by the gauges and the order of their heads to one model. With rotary
  embeddings or a soft cap the scores depend on a key bias, so it is kept, except on columns that are not rotated. With
  ALiBi and relative biases heads are not reordered. Normalised queries and keys leave a smaller gauge group, which is
  [fixed as well](gauges.md#attention-heads). For latent vectors it accepts `attention(layer).numerator()`, not the
  checkpoint.

## Compression

- Methods `matrix`, `ttm`, `tucker` and `cp` are the same for all architectures. `heads` truncates QK as one product, or
  W_Q and W_K as matrices if rotary embeddings or norms act between them. OV is one product in every architecture, that
  of all query heads that share a value head.
- Latent vectors are stored as maps to and from them. Methods `matrix`, `ttm` and `calibrated` factorise each map, and
  the output projection, as a matrix; `heads`, `tucker` and `cp` are refused.
- Experts (Mixtral, Qwen3-MoE, DeepSeek), shared experts included, can be folded, rotated and run. `compress` does not
  change them, and requires `--what attention`.
"""


def page(rows: Mapping[str, Case]) -> str:
    columns = ("model", "heads", "positions", "other properties", *MEASURES)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, case in rows.items():
        layer = case.checkpoint.attention(0)
        cells = (shown(measure(case)) for measure in MEASURES.values())
        lines.append("| " + " | ".join((name, heads(layer), positions(case, layer), besides(case), *cells)) + " |")
    return TEXT.format(version=transformers.__version__) + "\n" + "\n".join(lines) + "\n" + NOTES


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure all architectures, in minutes, and write a page.")
    parser.add_argument("page", nargs="?", type=Path, default=PAGE)
    target = parser.parse_args().page
    models.quiet()
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: make_case(name, Path(folder) / name) for name in sorted(models.MODELS)}
        target.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
