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
from tnlib_adapters import builtin_path
from tnlib_adapters.cli_options import arguments_of
from tnlib_adapters.compression.methods.decompositions import TruncatedSVD
from tnlib_adapters.files.safetensors_file import Entry, TensorInfo, encode, write_tensor_file

CHILD = "import sys; from benchmarks import large_models; getattr(large_models, sys.argv[1])(*sys.argv[2:])"
PLAIN = {"method": "matrix", "what": "all", "keep": 0.5}
CALIBRATED = {"method": "calibrated", "what": "all", "keep": 0.5}
TEXT, SHORT_TEXT = 16 * 256, 2 * 256  # tokens, in windows of 256; a tenth more is held out
LAYERS_OF_FILE = 4
SMALL_MEMORY = 735_000_000  # bytes; less than the models of the growth need to stay in memory
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
    """A compression of a made-up model; `arguments` are those of `tnlib_adapters.compress`.

    `tokens` are those of the calibration text, 0 for a compression without one; `growth` is True for one of a series
    over layers.
    """

    name: str
    model: Llama
    arguments: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    tokens: int = 0
    growth: bool = False


def cases(scale: str) -> list[Case]:
    """Return the series over layers, the model of 1.1 billion parameters, and two layers of one of 8 billion."""
    d, small = 512, scale == "small"
    series = [Llama(n, 64 if small else d, 8, 2, 176 if small else 1408, 1024 if small else 2048) for n in (4, 8, 16)]
    cache = {"cache_bytes": 2**18 if small else SMALL_CACHE}
    texts = (
        (PLAIN | cache, 0),
        (CALIBRATED | (cache if small else {"max_memory": SMALL_MEMORY}), SHORT_TEXT if small else TEXT),
    )
    growth = [
        Case(f"{model.n_layers} layers of {model.d_model}", model, arguments, tokens, growth=True)
        for arguments, tokens in texts
        for model in series
    ]
    if small:
        return growth
    billion, layers_of_8 = Llama(22, 2048, 32, 4, 5632, 32_000), Llama(2, 4096, 32, 8, 14_336, 32_000)
    return [
        *growth,
        Case("1.1 billion", billion),
        Case("1.1 billion", billion, CALIBRATED, TEXT),
        Case("2 layers of 8 billion", layers_of_8, CALIBRATED, TEXT),
    ]


def measure(scale: str, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return a row for every case, or for those of these names."""
    return [row_of(case) for case in cases(scale) if not names or case.name in names]


def row_of(case: Case) -> dict[str, Any]:
    """Make the model, compress it, and return sizes, seconds and the peak of the resident memory in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "model", Path(scratch) / "out"
        make(case.model, source)
        text = calibration_text(source, case.tokens) if case.tokens else None
        arguments = case.arguments | ({"calibrate": str(text)} if text else {})
        found = _in_child("compressed", source, out, json.dumps(arguments))
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        return {
            "case": case.name,
            "layers": case.model.n_layers,
            "growth": case.growth,
            "tokens": case.tokens,
            "arguments": case.arguments,
            "bytes": size,
            "copying": seconds_of_copying(source, out),
            "svd": 0.0 if text else seconds_of_svd(case.model),
            "pass": _in_child("forward_pass", source, text) if text else [0.0, 0.0],
            **found,
        }


def _in_child(function: str, *arguments: Any) -> Any:
    """Return the result of a function of this module that runs in a process of its own."""
    command = [sys.executable, "-c", CHILD, function, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compressed(source: str, out: str, arguments: str) -> None:
    """Compress, and print seconds and peak memory; the process does nothing else."""
    import tnlib_adapters
    from tnlib_adapters.compression import compress as module
    from tnlib_adapters.compression.source_model import Limits
    from tnlib_adapters.files.process_memory import peak_memory

    options = json.loads(arguments)
    if (n_bytes := options.pop("cache_bytes", None)) is not None:
        module.limits_of = lambda _checkpoint, _request: Limits(cache=n_bytes)
    started = time.perf_counter()
    report = tnlib_adapters.compress(source, out, **arguments_of(**options))
    seconds = time.perf_counter() - started
    found = {"seconds": seconds, "processor": time.process_time(), "peak": peak_memory()}
    print(json.dumps(found | {"kept": report.kept, "error": report.measured}))


def forward_pass(source: str, text: str) -> None:
    """Print the seconds of a forward pass over the calibration part of a text, block by block, and of the processor."""
    from tnlib_adapters.compression.text import hold_out
    from tnlib_adapters.instrument.block_passes import OuterLayers, Streams, forward
    from tnlib_adapters.instrument.running_model import open_running

    model = open_running(source)
    batches = model.batches(hold_out(model.sequences([Path(text).read_text(encoding="utf-8")]))[0])
    with tempfile.TemporaryDirectory() as folder:
        started, processor = time.perf_counter(), time.process_time()
        forward(OuterLayers(model), Streams(batches, model.sizes.d_model, folder=Path(folder)))
        print(json.dumps([time.perf_counter() - started, time.process_time() - processor]))


def calibration_text(source: Path, n_tokens: int) -> Path:
    """Add the tokenizer of the built-in Llama, and return a text with this many tokens besides the held-out tenth."""
    from transformers import AutoTokenizer

    from benchmarks.texts import sentences

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_path("llama") / name, source / name)
    tokenizer, lines, count = AutoTokenizer.from_pretrained(str(source)), list[str](), 0
    for line in sentences("docstrings", n_tokens):
        if count > n_tokens * 10 / 9:
            break
        lines.append(line)
        count += len(tokenizer(line)["input_ids"])
    text = source.with_name("text.txt")
    text.write_text("\n".join(lines), encoding="utf-8")
    return text


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
    from benchmarks.report import table

    plain, calibrated = ([row for row in rows if bool(row["tokens"]) == with_text] for with_text in (False, True))
    yield from ("## Large models", "", ABOUT, "")
    if plain:
        header = ("model", "file", "peak memory", "seconds", "copying (s)", "SVDs (s)", "seconds to both", "error")
        yield from table(header, (_cells(row, row["copying"], row["svd"]) for row in plain))
        yield from _exponents(plain)
    if calibrated:
        calibrated = [row | {"seconds": row["processor"]} for row in calibrated]
        yield from (ABOUT_CALIBRATED, "")
        header = ("model", "file", "peak memory", "processor (s)", "one pass (s)", "passes", "divergence")
        yield from table(header, (_cells(row, row["pass"][1]) for row in calibrated))
        yield from _exponents(calibrated)


def _exponents(rows: list[dict[str, Any]]) -> Iterator[str]:
    from benchmarks.growth import slope

    growth = [row for row in rows if row["growth"]]
    if len(growth) > 1:
        layers = [row["layers"] for row in growth]
        exponents = [slope(layers, [row[what] for row in growth]) for what in ("seconds", "peak")]
        yield "Exponent of the number of layers: {:.2f} for the seconds, {:.2f} for the peak memory.".format(*exponents)
        yield ""


ABOUT = """\
`compress` of random Llamas in bf16 without calibration data (`--what all --keep 0.5 --method matrix`), each in its
own process. "Copying" is the time to read the weight files and write those of the result, "SVDs" the time of one SVD
of every weight, both measured in the same run; "seconds to both" is the ratio of the seconds to the sum of these two
times. Models that are named by their number of layers hold 64 MiB of factors in memory, less than the factors of
their layers; the others hold 256 MiB, the default. Factors beyond that are in temporary files."""
ABOUT_CALIBRATED = f"""\
The same with calibration data of {TEXT:,} tokens in windows of 256 (`--calibrate TEXT --what all --keep 0.5`). "One
pass" is a forward pass of the original over this text, block by block, in the same run. Both times are CPU times,
which do not depend on other processes of the machine. Models that are named by their number of layers run with
`--max-memory` at 735 MB, so that their weights do not stay in memory. The KL divergence of a random model shows only
that the compressed model runs: random weights have no low-rank structure."""


def _cells(row: dict[str, Any], *least: float) -> tuple[str, ...]:
    seconds = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (row["seconds"], *least)]
    memory = [f"{row[name] / 1e6:,.0f} MB" for name in ("bytes", "peak")]
    return (row["case"], *memory, *seconds, f"{row['seconds'] / sum(least):.2f}x", f"{row['error']:.4f}")


@click.command()
@click.option("--scale", type=click.Choice(("full", "small")), default="full")
@click.option("--case", "names", multiple=True, help="Name of a case; all by default.")
def main(scale: str, names: tuple[str, ...]) -> None:
    rows = measure(scale, names)
    print(json.dumps(rows), file=sys.stderr)
    print("\n".join(section(rows)))


if __name__ == "__main__":
    main()
