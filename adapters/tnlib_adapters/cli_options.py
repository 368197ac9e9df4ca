"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from tnlib import ArgumentError
from tnlib_adapters.compression.methods.method_table import TABLE
from tnlib_adapters.compression.options import (
    CALIBRATION_TOKENS,
    LAYOUTS,
    OTHER_COMMANDS,
    STORES,
    Budget,
    Calibration,
    Run,
)
from tnlib_adapters.compression.request import EFFORTS, WHAT
from tnlib_adapters.files.tokenizer import MAX_TOKENS

_FLAGS = {"memory": "max_memory"}  # attributes of `Run` -> names of the options


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, with a decimal unit K, M, G or T."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes; refuse anything else."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", value.strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a number of bytes; pass for example 4G or 4000M.", param, ctx)
        return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


class LayoutChoice(click.Choice):  # type: ignore[type-arg]
    """A layout; the refusal of other forms names the commands that write them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the layout; refuse anything else."""
        if value in OTHER_COMMANDS:
            self.fail(f"{value!r} is not a layout; run {OTHER_COMMANDS[value]}.", param, ctx)
        return super().convert(value, param, ctx)


# fmt: off
_COMPRESSION = (
    click.option("--keep", type=float, metavar="FRACTION",
                  help="Largest fraction of the parameters of the compressed part to store, in (0, 1]."),
    click.option("--max-error", type=float, metavar="E",
                  help="Choose the smallest size with a predicted error of at most E. With --calibrate: the fewest "
                  "bits, for 1 - cosine of the embeddings or the KL divergence in nats per token. Without: the fewest "
                  "parameters, for the relative error of the weights."),
    click.option("--bits", type=float, metavar="BITS",
                  help="Largest average of stored bits per parameter of the compressed part, with scales and biases; 4 "
                  "if no size is given. Requires --calibrate. With --keep, both bounds hold. Below 2 bits weights "
                  "become factors in 2 or 3 bits, with large errors."),
    click.option("--flops", type=float, metavar="FRACTION",
                  help="Largest fraction of the multiplications per token in the compressed weights, for speed. "
                  "Requires --calibrate. With --keep, both bounds hold."),
    click.option("--what", type=click.Choice(WHAT), default="all", show_default=True,
                  help="Part of the model to compress. all: attention, feed-forward layers, token embeddings and "
                  "unembedding. linear: attention and feed-forward layers, which layouts of engines hold. mlp: the "
                  "matrices of the feed-forward layers."),
    click.option("--method", type=click.Choice(tuple(TABLE)),
                  show_default="with --calibrate: calibrated for --keep or --flops without --bits, else quantized; "
                  "without --calibrate: heads, or matrix with --what mlp or with --store alone",
                  help="Compression method; see Methods below."),
    click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
                  help="Calibration data, representative of the model's use: a text file, JSON Lines (*.jsonl) with "
                  "\"text\" or \"messages\", token ids (*.npy), or a folder saved by datasets. A tenth is held out for "
                  "evaluation. Needs torch and transformers."),
    click.option("--calibration-tokens", type=int, metavar="N", default=CALIBRATION_TOKENS, show_default=True,
                  help="Requires --calibrate. Tokens that are used, sampled from the text."),
    click.option("--window", type=int, metavar="N", default=MAX_TOKENS, show_default=True,
                  help="Requires --calibrate. Lines are truncated at N tokens; a language model reads windows of N "
                  "tokens."),
    click.option("--folder", type=click.Path(path_type=Path), metavar="FOLDER",
                  help="Requires --calibrate. Folder for the intermediate results of every block, from which an "
                  "interrupted run resumes. The statistics of the text stay there, for another size."),
    click.option("--max-memory", type=Bytes(), metavar="BYTES",
                  help="Bound of the memory of the process, such as 4G or 4000M; the rest is in temporary files. Where "
                  "batches become smaller, the result changes."),
    click.option("--effort", type=click.Choice(EFFORTS), default="default", show_default=True,
                  help="Passes over the text in which the result is fitted to the original: low, none; default, two; "
                  "high, six. Factors are fitted block by block before, encoders and models beyond memory only so, in "
                  "up to six passes, or with high in up to 400 steps."),
    click.option("--layout", type=LayoutChoice(tuple(LAYOUTS)), default="factored", show_default=True,
                  help="Form of OUT; see Layouts below."),
    click.option("--store", type=click.Choice(list(STORES)), default="float", show_default=True,
                  help="Number format of the factors; float is the dtype of the weights. An integer format with "
                  "--calibrate and without a size rounds every weight to that many bits."),
)
# fmt: on


def arguments_of(**options: Any) -> dict[str, Any]:
    """Return the keyword arguments of `compress` and `plan` for options of the command line by name.

    >>> arguments = arguments_of(keep=0.5, calibrate="text.txt", window=64, what="mlp")
    >>> arguments["calibration"].window
    64
    """
    text = options.pop("calibrate", None)
    usual = {"calibration_tokens": CALIBRATION_TOKENS, "window": MAX_TOKENS}
    of_text = {name: options.pop(name, value) for name, value in usual.items()}
    if text is None and of_text != usual:
        name = next(name for name, value in of_text.items() if value != usual[name]).replace("_", "-")
        raise ArgumentError(f"compress: --{name} must come with --calibrate TEXT, got none; pass that too.")
    tokens = of_text.pop("calibration_tokens")
    options["calibration"] = None if text is None else Calibration(text, tokens, **of_text)
    for name, kind in (("budget", Budget), ("run", Run)):
        names = {_FLAGS.get(field.name, field.name): field.name for field in fields(kind)}
        options[name] = kind(**{keyword: options.pop(flag) for flag, keyword in names.items() if flag in options})
    return options


METHODS_HELP = {name: row.help for name, row in TABLE.items()}


def options_of_placement(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a model that runs on a text."""
    device = click.option(
        "--device",
        default="cpu",
        show_default=True,
        metavar="DEVICE",
        help="Device on which the model runs on the text, as torch names it: cuda, cuda:1, mps.",
    )
    dtype = click.option(
        "--dtype",
        type=click.Choice(("float32", "bfloat16", "float16")),
        default="float32",
        show_default=True,
        help="Dtype of the weights while the model runs.",
    )
    return device(dtype(command))


def options_of_compression(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that `compress` and `plan` share."""
    for option in reversed(_COMPRESSION):
        command = option(command)
    return command
