"""Options of `compress` and `plan`: size of the result, calibration data, device and memory.

Read by the command line: nothing here imports numpy before a path is given.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.files.tokenizer import MAX_TOKENS

LAYOUTS = {  # with lines for the help of --layout
    "factored": "the factors; transformers loads them after `import tnlib_adapters.transformers_plugin`",
    "dense": "the product of the factors under the original names, at the original size; loads without tnlib",
    "gptq": "linear layers in 2, 3, 4 or 8 bits as GPTQ stores them: gptqmodel loads it, and vLLM 4 and 8 bits",
    "compressed-tensors": "linear layers in 2 to 8 bits, pack-quantized: transformers with compressed-tensors and vLLM "
    "load it",
    "gguf": "all matrices of a Llama in 2 to 8 bits, and its tokenizer, in one file model.gguf: "
    "llama.cpp and transformers load it",
    "onnxruntime": "linear layers in 2, 4 or 8 bits in groups, for `tnlib export-onnx` (encoders) and the builder of "
    "onnxruntime-genai (other models, stored as GPTQ does)",
}

# forms that `compress` does not write, and the commands that do
OTHER_COMMANDS: Mapping[str, str] = {
    "onnx": "`tnlib compress IN SMALL --keep 0.5`, then `tnlib export-onnx SMALL OUT`",
}

CALIBRATION_TOKENS = 65_536  # moments converge with half of them; the fit has as many unknowns as a layer

STORES = {"float": None, "int8": 8, "int4": 4, "int3": 3, "int2": 2}  # name -> bits of a number


@dataclass(frozen=True)
class Budget:
    """Size of the compressed part of a model; several bounds hold together. Without any, see `method` of `compress`.

    Parameters
    ----------
    bits
        Average number of stored bits per parameter, in (0, 32], scales and biases counted. Every weight is rounded to
        integers of 2 to 8 bits, whole or as factors, chosen by their effect on the output (method "quantized"); needs
        calibration data.
    keep
        Fraction in (0, 1] of the parameters that is stored, all factors and biases counted. The result is at most 0.01
        below it. Beside `bits`, at most this fraction is stored, in at most so many bits.
    flops
        Largest fraction in (0, 1] of the multiplications per token in the compressed weights, where two factors of rank
        r of a weight (m, n) take :math:`r (m + n)`, and at most :math:`m n`; a table of embeddings that is only looked
        up takes none. Beside `keep`, both are met: the parameters that this leaves over go to tables. Only for method
        "calibrated".
    max_error
        Largest predicted error; the smallest size within it is chosen. Without calibration data, the error is the root
        mean square of the relative errors of the truncated operators and weights; with them, 1 - cosine of the
        embeddings or the divergence of the predictions in nats per token, before the fit. Only for methods that predict
        their error: without calibration data all but "cp", with them "calibrated" and "quantized".
    store
        Number format of the factors. "float" writes them in the dtype of the weights, "int8" in one byte per number,
        rounded to nearest, with a scale for every component; "int4", "int3" and "int2" in so many bits per parameter,
        packed, with a scale for every 64 numbers. Biases are not rounded. Without a bound and without calibration data
        this is plain rounding of the weights. Scales count as bytes, not as parameters. With layout "dense" the
        products of the rounded factors are written.

    Raises
    ------
    ArgumentError
        If a value is outside its range.

    Examples
    --------
    >>> from tnlib_adapters import Budget
    >>> Budget(bits=3, keep=0.5)
    Budget(bits=3.0, keep=0.5, flops=None, max_error=None, store='float')
    """

    bits: float | None = None
    keep: float | None = None
    flops: float | None = None
    max_error: float | None = None
    store: str = "float"

    def __post_init__(self) -> None:
        for name, (is_inside, bounds, meaning) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_real or not is_inside(float(value)):
                raise ArgumentError(f"Budget: {name} must {bounds}, got {value!r}; it is {meaning}.")
            object.__setattr__(self, name, float(value))
        check_one_of("Budget", "store", self.store, tuple(STORES))

    @property
    def unbounded(self) -> bool:
        """True if no size is requested."""
        return all(bound is None for bound in (self.bits, self.keep, self.flops, self.max_error))

    @property
    def width(self) -> int | None:
        """Bits of a stored number; None if factors are stored as floats."""
        return STORES[self.store]


@dataclass(frozen=True)
class Calibration:
    """Calibration data, representative of the model's use. A tenth is held out to measure the result on.

    Needs torch and transformers.

    Parameters
    ----------
    text
        Text file in UTF-8; JSON Lines (``.jsonl``) of objects with a string "text", or with "messages", which go
        through the chat template of the tokenizer; token ids (``.npy``), integers (tokens,) or (documents, tokens); or
        a folder that the library datasets saved, with a column "text" or "messages".
    tokens
        Tokens that are used, sampled from the text: all of them for the fit, half of them for the statistics.
    window
        Tokens that are read of each line: longer lines are truncated. A language model reads windows of this many
        tokens instead, and no line is truncated. At most the context of the model. The report has the number of
        truncated lines.

    Raises
    ------
    ArgumentError
        If `tokens` or `window` is below 2.

    Examples
    --------
    >>> Calibration("text.txt", tokens=20_000).window
    256
    """

    text: str | os.PathLike[str]
    tokens: int = CALIBRATION_TOKENS
    window: int = MAX_TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _as_path("Calibration", "text", self.text))
        _check_integer("Calibration", "tokens", self.tokens, f"for example {CALIBRATION_TOKENS}", least=2)
        _check_integer("Calibration", "window", self.window, f"for example {MAX_TOKENS}", least=2)


@dataclass(frozen=True)
class Run:
    """Device, memory, executor and progress. The result does not depend on `executor` and `folder`.

    Parameters
    ----------
    device
        Device on which the model runs on the calibration data, as torch names it: "cpu", "cuda", "cuda:1", "mps".
        Blocks are moved there one at a time, and large weights are decomposed there.
    dtype
        Of the weights while they run: "float32", "bfloat16" or "float16". Sums over tokens, the factors that are fitted
        and all that is written are not in it.
    memory
        Bound of the resident memory of the process, in bytes. What the libraries and the work on the largest weight
        leave of it is shared by a batch of the text, factors and streams between blocks, and the weights of the running
        model; what is beyond their share is written into temporary files, in a hidden folder beside `out` that is
        removed at the end. Batches of fewer than 1,024 tokens change the result. None for the defaults, with 256 MiB of
        factors and streams.
    folder
        Folder for what "calibrated" and "quantized" keep between blocks: the streams of the text, and statistics.
        After an interruption the same call goes on from it, at the block where it stopped. The statistics stay there,
        for another size by the same method of the same model on the same text. None for a temporary folder.
    executor
        Executor (`concurrent.futures.Executor`) that decomposes and rounds the weights, such as a ProcessPoolExecutor,
        ``dask.distributed.Client(address).get_executor()`` or an MPIPoolExecutor of mpi4py. None for this process.
    progress
        Called with (stage, done, total).
    force
        Replace `out` if it is not empty.

    Raises
    ------
    ArgumentError
        If a value is outside its range.

    Examples
    --------
    >>> Run(memory=4 * 10**9, folder="statistics").memory
    4000000000
    """

    device: str = "cpu"
    dtype: str = "float32"
    memory: int | None = None
    folder: str | os.PathLike[str] | None = None
    executor: Executor | None = None
    progress: Progress = quiet
    force: bool = False

    def __post_init__(self) -> None:
        if self.memory is not None:
            _check_integer("Run", "memory", self.memory, f"the bytes, for example {4 * 10**9} (--max-memory 4G)")
        if self.folder is not None:
            object.__setattr__(self, "folder", _as_path("Run", "folder", self.folder))
        if self.executor is not None and not isinstance(self.executor, Executor):
            raise ArgumentTypeError(
                f"Run: executor must be a concurrent.futures.Executor, got {self.executor!r}; pass for example "
                "ProcessPoolExecutor(2)."
            )


def check_one_of(function: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise if a value is not among the known ones."""
    if value not in known:
        raise ArgumentError(f"{function}: {name} must be one of {', '.join(known)}, got {value!r}; choose one of them.")


def _as_path(function: str, name: str, path: Any) -> Path:
    from tnlib._validate import as_path

    return as_path(function, name, path)


def _check_integer(function: str, name: str, value: Any, example: str, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{function}: {name} must be an integer, got {value!r}; pass {example}.")
    if value < least:
        raise ArgumentError(f"{function}: {name} must be at least {least}, got {value}; pass {example}.")


_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str, str]] = {  # of a budget: range, in words, and meaning
    "bits": (
        lambda bits: 0.0 < bits <= 32.0,
        "lie in (0, 32]",
        "the average number of stored bits per parameter, for example 4",
    ),
    "keep": (
        lambda keep: 0.0 < keep <= 1.0,
        "lie in (0, 1]",
        "the fraction of the parameters that is still stored, for example 0.5",
    ),
    "flops": (
        lambda flops: 0.0 < flops <= 1.0,
        "lie in (0, 1]",
        "the fraction of the multiplications per token that is left, for example 0.5",
    ),
    "max_error": (
        lambda error: 0.0 <= error < math.inf,
        "be a number from 0 on",
        "the predicted error that is allowed, for example 0.02",
    ),
}
