"""Memory and time of `compress` on made-up Llamas in bf16, each compression in a process of its own.

python -m benchmarks.large_models [--scale full|small]     print the section of docs/benchmarks.md
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from tnlib_adapters.compression.methods.matrices import TruncatedSVD
from tnlib_adapters.files.tensor_file import Entry, TensorInfo, encode, write_tensor_file

CHILD = "import sys; from benchmarks.large_models import child; child(*sys.argv[1:])"
PLAIN = {"method": "matrix", "what": "all", "keep": 0.5}
LAYERS_OF_FILE = 4
SMALL_CACHE = 2**26  # bytes; less than one layer of the models of the growth needs, so that no layer stays in memory


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama."""

    n_layers: int
    d_model: int
    n_heads: int
    kv_heads: int
    d_ff: int
    vocab: int

    @property
    def layer(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a layer, by their names below it."""
        d, d_kv = self.d_model, self.d_model // self.n_heads * self.kv_heads
        attention = {"q": (d, d), "k": (d_kv, d), "v": (d_kv, d), "o": (d, d)}
        mlp = {"gate": (self.d_ff, d), "up": (self.d_ff, d), "down": (d, self.d_ff)}
        return (
            {f"self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
            | {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
            | {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        )

    @property
    def files(self) -> list[dict[str, tuple[int, ...]]]:
        """Shapes of all tensors, by name, in shards."""
        tables = {"model.embed_tokens.weight": (self.vocab, self.d_model), "lm_head.weight": (self.vocab, self.d_model)}
        layers = range(self.n_layers)
        shards = [
            {f"model.layers.{k}.{name}": shape for k in layers[first : first + LAYERS_OF_FILE]
             for name, shape in self.layer.items()}
            for first in layers[::LAYERS_OF_FILE]
        ]  # fmt: skip
        return [*shards, tables | {"model.norm.weight": (self.d_model,)}]

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Case:
    """A compression of a made-up model; `arguments` are those of `tnlib_adapters.compress`."""

    name: str
    model: Llama
    arguments: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    growth: bool = False  # one of a series over layers


def cases(scale: str) -> list[Case]:
    """Return the model of 1.1 billion parameters, and the series over layers."""
    d, small = 512, scale == "small"
    series = [Llama(n, 64 if small else d, 8, 2, 176 if small else 1408, 256 if small else 2048) for n in (4, 8, 16)]
    arguments = PLAIN | {"cache_bytes": 2**18 if small else SMALL_CACHE}
    growth = [Case(f"{model.n_layers} layers of {model.d_model}", model, arguments, growth=True) for model in series]
    return growth if small else [*growth, Case("1.1 billion", Llama(22, 2048, 32, 4, 5632, 32_000))]


def measure(scale: str, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return a row for every case, or for those of these names."""
    return [row_of(case) for case in cases(scale) if not names or case.name in names]


def row_of(case: Case) -> dict[str, Any]:
    """Make the model, compress it, and return sizes, seconds and the peak of the resident memory in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "model", Path(scratch) / "out"
        make(case.model, source)
        command = [sys.executable, "-c", CHILD, str(source), str(out), json.dumps(case.arguments)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        return {
            "case": case.name,
            "layers": case.model.n_layers,
            "growth": case.growth,
            "arguments": case.arguments,
            "bytes": size,
            "copying": seconds_of_copying(source, out),
            "svd": seconds_of_svd(case.model),
            **found,
        }


def child(source: str, out: str, arguments: str) -> None:
    """Compress, and print seconds and peak memory; the process does nothing else."""
    import tnlib_adapters
    from tnlib_adapters.compression.report.report import peak_memory

    started = time.perf_counter()
    report = tnlib_adapters.compress(source, out, **json.loads(arguments))
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": peak_memory(), "kept": report.kept, "error": report.measured}))


@dataclass(frozen=True)
class _Random(TensorInfo):
    """A tensor of normal random numbers in bf16, 1 for a norm."""

    seed: int = field(kw_only=True)

    def read_stored(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        values = 0.02 * rng.standard_normal(self.shape, np.float32) if len(self.shape) > 1 else np.ones(self.shape)
        return encode(values, self.dtype)


def make(model: Llama, folder: Path) -> None:
    """Write a checkpoint with random weights in bf16, the same for the same sizes."""
    folder.mkdir()
    names, files = {}, model.files
    for k, shapes in enumerate(files):
        file = f"model-{k + 1:05}-of-{len(files):05}.safetensors"
        seeds = range(len(names), len(names) + len(shapes))
        entries = [
            Entry(name, "BF16", _Random(folder, name, "BF16", shape, 0, 0, seed=seed))
            for seed, (name, shape) in zip(seeds, shapes.items(), strict=True)
        ]
        for _ in write_tensor_file(folder / file, entries, {"format": "pt"}):
            pass
        names |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(model.config))


def seconds_of_copying(source: Path, out: Path) -> float:
    """Return the seconds in which the weight files of `source` are read, and those of `out` are written again."""
    started = time.perf_counter()
    for file in source.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass
    copied = out.with_name("copied")
    shutil.copytree(out, copied)
    shutil.rmtree(copied)
    return time.perf_counter() - started


def seconds_of_svd(model: Llama) -> float:
    """Return the seconds of one decomposition of every weight, as method "matrix" does it, one timed per shape."""
    counts = Counter(shape for shapes in model.files for shape in shapes.values() if len(shape) > 1)
    total, rng = 0.0, np.random.default_rng(0)
    for (n_out, n_in), count in counts.items():
        weight = rng.standard_normal((n_out, n_in), np.float32).T
        started = time.perf_counter()
        TruncatedSVD(weight)
        total += count * (time.perf_counter() - started)
    return total


def section(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the section of the page."""
    from benchmarks.growth import slope
    from benchmarks.report import table

    yield from ("## Large models", "", ABOUT, "")
    header = ("model", "file", "peak memory", "seconds", "copying (s)", "SVDs (s)", "seconds to both", "error")
    yield from table(header, (_cells(row) for row in rows))
    growth = [row for row in rows if row["growth"]]
    if len(growth) > 1:
        layers = [row["layers"] for row in growth]
        exponents = [slope(layers, [row[what] for row in growth]) for what in ("seconds", "peak")]
        yield "Exponent of the number of layers: {:.2f} for the seconds, {:.2f} for the peak memory.".format(*exponents)
        yield ""


ABOUT = """\
`compress` of random Llamas in bf16 without a text (`--what all --keep 0.5 --method matrix`), in a process of its own.
*Copying* reads the weight files and writes those of the result. *SVDs* decompose every weight once, timed in the same
run. Those with a number of layers keep 64 MiB of factors in memory, less than their layers have, the others 512 MiB,
the default; what exceeds it is in temporary files."""


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    least = row["copying"] + row["svd"]
    seconds = [
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (row["seconds"], row["copying"], row["svd"])
    ]
    memory = [f"{row[name] / 1e6:,.0f} MB" for name in ("bytes", "peak")]
    return (row["case"], *memory, *seconds, f"{row['seconds'] / least:.2f}x", f"{row['error']:.4f}")


@click.command()
@click.option("--scale", type=click.Choice(("full", "small")), default="full")
@click.option("--case", "names", multiple=True, help="Name of a case; all by default.")
def main(scale: str, names: tuple[str, ...]) -> None:
    rows = measure(scale, names)
    print(json.dumps(rows), file=sys.stderr)
    print("\n".join(section(rows)))


if __name__ == "__main__":
    main()
