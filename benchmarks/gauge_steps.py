"""What each change of basis is worth when the built-in Llama is rounded, and the expected loss by weight of SmolLM2.

    python -m benchmarks.gauge_steps [--bits 3 --bits 2] [--step stream ...]
    python -m benchmarks.smollm2
    python -m benchmarks.gauge_steps --expected

The first compresses the built-in Llama after one step of `choose_gauge`, by `quantized` with effort "low" on 16,384
tokens, and prints the divergence on both test texts. `--expected` rounds the weights of three layers of SmolLM2 by the
second moments of 4,096 tokens, without coordinate descent, and prints the expected loss by weight, relative to that of
the whole layer in the trained basis with norms folded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import tnlib_adapters
from scipy.linalg import block_diag
from tnlib_adapters import Attention, Budget, Calibration, Checkpoint, Run
from tnlib_adapters.checkpoints.modified import wide
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.compression.methods.compensated_rounding import round_compensated
from tnlib_adapters.compression.methods.components import rounding_loss
from tnlib_adapters.compression.text import sample_batches
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.factors.projections import NAMES
from tnlib_adapters.instrument.running_model import open_running
from tnlib_adapters.instrument.weight_inputs import find_uses
from tnlib_adapters.transforms import gauge_choice

from benchmarks.bits import collect
from benchmarks.calibrated import calibration_text
from benchmarks.language_models import WINDOW
from benchmarks.language_models import calibration_text as text_of_language_models
from benchmarks.smollm2 import smollm2_and_tokenizer
from benchmarks.texts import TEST_KINDS, tested_sentences
from tnlib._typing import Array

STEPS: Mapping[str, Callable[[Checkpoint], Checkpoint]] = {
    "trained": lambda checkpoint: checkpoint,
    "norms folded": lambda checkpoint: tnlib_adapters.fold(checkpoint).checkpoint,
    "stream": lambda checkpoint: gauge_choice.rotate_stream(tnlib_adapters.fold(checkpoint).checkpoint, 0, [], []),
    "heads": lambda checkpoint: gauge_choice.turn_heads(checkpoint, 0, [], []),
}
LAYERS, TOKENS = (4, 15, 26), 4096
WEIGHTS = (*NAMES, "up", "gate", "down")


def divergences(step: str, bits: float, what: str) -> list[float]:
    """Return the divergence of the built-in Llama on the test texts, compressed after a step."""
    source = tnlib_adapters.builtin_path("llama")
    with tempfile.TemporaryDirectory() as scratch:
        changed, out, text = (Path(scratch) / name for name in ("changed", "out", "text"))
        tnlib_adapters.save_checkpoint(STEPS[step](tnlib_adapters.open_checkpoint(source)), changed)
        text.write_text(calibration_text("both", 0), encoding="utf-8")
        calibration = Calibration(text, tokens=16_384)
        tnlib_adapters.compress(
            changed, out, Budget(bits=bits), calibration=calibration, what=what, effort="low", run=Run(force=True)
        )
        measured = []
        for kind in TEST_KINDS:
            text.write_text("\n".join(tested_sentences(kind)), encoding="utf-8")
            measured.append(tnlib_adapters.evaluate(source, out, text).divergence)
        return measured


@dataclass(frozen=True)
class Layer:
    """Weights of a layer acting on rows, with the second moments of inputs and gradients, and the loss per unit."""

    weights: Mapping[str, Array]
    reads: Mapping[str, Array]
    slopes: Mapping[str, Array]
    scales: Mapping[str, float]

    @classmethod
    def of(cls, checkpoint: Checkpoint, k: int, statistics: Statistics) -> Layer:
        """Return a layer of a Llama."""
        part = checkpoint.wiring.layers[k].feed_forward
        if part is None or part.gate is None:
            raise SystemExit("gauge_steps: the layer has no gate.")
        linears = {"up": part.up, "gate": part.gate, "down": part.down}
        weights = {name: w.astype(np.float64) for name, w in checkpoint.projections(k).weights.items()}
        weights |= {name: linear.on_rows(wide(checkpoint, linear.weight)) for name, linear in linears.items()}
        keys = {name: f"{k}.{name}" for name in NAMES} | {name: linear.name for name, linear in linears.items()}
        reads = {name: statistics.reads_of_projection(k, name, len(weights[name])) for name in NAMES}
        reads |= {name: statistics.reads[keys[name]] for name in linears}
        slopes = {name: statistics.slopes[key] for name, key in keys.items()}
        return cls(weights, reads, slopes, {name: float(statistics.scales[key][0]) for name, key in keys.items()})

    def rotated(self, r: Array) -> Layer:
        """Return the layer with the stream x R."""
        weights, reads, slopes = dict(self.weights), dict(self.reads), dict(self.slopes)
        for name in weights:
            if name in ("o", "down"):
                weights[name], slopes[name] = weights[name] @ r, r.T @ slopes[name] @ r
            else:
                weights[name], reads[name] = r.T @ weights[name], r.T @ reads[name] @ r
        return Layer(weights, reads, slopes, self.scales)

    def with_heads(self, layer: Attention) -> Layer:
        """Return the layer with the values and outputs of heads as `choose_gauge` turns them, `layer` as it is here."""
        turned = gauge_choice.turned_heads(layer, seed=0)
        pairs = zip(layer.W_V.astype(np.float64), turned.W_V, strict=True)
        blocks = np.stack([np.linalg.lstsq(before, after, rcond=None)[0] for before, after in pairs])
        g, of_heads = block_diag(*blocks), block_diag(*layer.repeated(blocks))
        inverse, weights = np.linalg.inv(g), dict(self.weights)
        weights |= {"v": weights["v"] @ g, "o": np.linalg.inv(of_heads) @ weights["o"]}
        reads = {**self.reads, "o": of_heads.T @ self.reads["o"] @ of_heads}
        return Layer(weights, reads, {**self.slopes, "v": inverse @ self.slopes["v"] @ inverse.T}, self.scales)

    def with_units(self) -> Layer:
        """Return the layer with units scaled by the moments of W_down: the closed form for scales shared by columns."""
        down, reads, slopes = self.weights["down"], self.reads["down"], self.slopes["down"]
        s = np.sqrt(np.sqrt(np.diag(reads)) / np.sqrt(np.einsum("ij,jk,ik->i", down, slopes, down, optimize=True)))
        weights = {**self.weights, "up": self.weights["up"] / s, "down": s[:, None] * down}
        reads = {**self.reads, "down": reads / np.outer(s, s)}
        return Layer(weights, reads, {**self.slopes, "up": np.outer(s, s) * self.slopes["up"]}, self.scales)

    def loss(self, name: str, bits: int, group: int) -> float:
        """Return the expected loss of rounding one weight."""
        weight, metric = self.weights[name], (self.reads[name], self.slopes[name])
        rounded = round_compensated(weight, IntegerFormat(bits, 0, group), *metric, descend=False)
        return self.scales[name] * rounding_loss(weight - rounded.values(), *metric)


def expected() -> None:
    """Print the expected losses of SmolLM2."""
    original, tokenizer = smollm2_and_tokenizer()
    checkpoint = tnlib_adapters.fold(original).checkpoint
    model = open_running(checkpoint, max_tokens=WINDOW)
    uses = find_uses(model, compressed_weights(checkpoint, "linear"))
    text = text_of_language_models(tokenizer)
    statistics = collect(model, uses, sample_batches(model.batches(text), TOKENS))
    rotation = gauge_choice.incoherent_rotation(checkpoint.sizes.d_model, np.random.default_rng(0))
    trained = [Layer.of(checkpoint, k, statistics) for k in LAYERS]
    rotated = [layer.rotated(rotation) for layer in trained]
    steps = {
        "trained": trained,
        "stream": rotated,
        "stream, heads": [layer.with_heads(checkpoint.attention(k)) for k, layer in zip(LAYERS, rotated, strict=True)],
        "stream, units": [layer.with_units() for layer in rotated],
        "units": [layer.with_units() for layer in trained],
    }
    print(f"| bits | group | basis | {' | '.join(WEIGHTS)} | sum |", "|---" * (len(WEIGHTS) + 4) + "|", sep="\n")
    for bits, group in ((2, 0), (3, 0), (3, 128)):
        total = 0.0
        for step, layers in steps.items():
            losses = [sum(layer.loss(name, bits, group) for layer in layers) for name in WEIGHTS]
            total = total or sum(losses)
            cells = " | ".join(f"{loss / total:.3f}" for loss in (*losses, sum(losses)))
            print(f"| {bits} | {group} | {step} | {cells} |", flush=True)


@click.command()
@click.option("--bits", multiple=True, type=float, default=(3.0, 2.0))
@click.option("--what", multiple=True, default=("attention", "mlp"))
@click.option("--step", "steps", multiple=True, type=click.Choice(tuple(STEPS)), default=tuple(STEPS))
@click.option("--expected", "only_expected", is_flag=True)
def main(bits: tuple[float, ...], what: tuple[str, ...], steps: tuple[str, ...], only_expected: bool) -> None:
    if only_expected:
        expected()
        return
    print("| step | what | bits | manuals | reference |", "|---|---|---|---|---|", sep="\n")
    for step in steps:
        for part in what:
            for width in bits:
                cells = " | ".join(f"{value:.4f}" for value in divergences(step, width, part))
                print(f"| {step} | {part} | {width:g} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
