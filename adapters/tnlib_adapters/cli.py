"""Command line: arguments, progress bars and tables; each command calls one public function.

Exit statuses: 0 success; 1 the reader of a pipe has gone; 2 wrong arguments or input, nothing was written;
`OUTPUT_REFUSED` the work is done, but standard output cannot be written to; 130, 129, 143 ended by a signal.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import click

from tnlib_adapters.compression.layouts.layout_table import LAYOUTS, OTHER_COMMANDS, SMALLER_MODELS, sizes_help
from tnlib_adapters.compression.methods.table import TABLE
from tnlib_adapters.compression.request import STORES, WHAT, methods_help
from tnlib_adapters.files.tokenizer import MAX_TOKENS
from tnlib_adapters.inspection import PAGE as INSPECT_PAGE

if TYPE_CHECKING:
    from tnlib_adapters.compression.request import Progress

OUTPUT_REFUSED = 3  # exit status

BUILTIN = {"builtin": "induction", "builtin-llama": "llama"}
_LINES_HELP = f"Lines are truncated at {MAX_TOKENS} tokens; a language model reads windows of that many."
_IN_HELP = (
    "IN is a checkpoint folder, the name of a model in the local cache of the Hugging Face hub, or one of the trained "
    "models that are part of the package: " + ", ".join(f'"{name}"' for name in BUILTIN) + "."
)


_EXAMPLES = """\b
Examples:
  tnlib compress IN OUT --calibrate TEXT
  tnlib plan IN --calibrate TEXT
  tnlib compare IN --keep 0.75 --keep 0.5 --out FOLDER
  tnlib evaluate IN OUT TEXT
  tnlib adapter BASE TUNED OUT --rank 16
  tnlib export-onnx IN OUT
  tnlib decompose X.npy OUT.safetensors --rtol 1e-6
  tnlib info OUT.safetensors
  tnlib inspect IN --text "Mary gave the book to John" --out FOLDER
"""


class _Command(click.Command):
    """A command whose summary is not cut in the list of commands."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first paragraph of the help."""
        return " ".join((self.help or "").split("\n\n")[0].split())


class _Commands(click.Group):
    command_class = _Command

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command; an output that cannot be written is one sentence, and no encoding lacks a character."""
        with _output():
            return super().main(*args, **options)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES)
@click.version_option(package_name="tnlib")
def main() -> None:
    """Low-rank tensors in the weights of transformer checkpoints: compress, compare, evaluate, inspect."""


class _Bytes(click.ParamType):  # type: ignore[type-arg]
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


class _Layout(click.Choice):  # type: ignore[type-arg]
    """A layout; the refusal of other forms names the commands that write them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the layout; refuse anything else."""
        if value in OTHER_COMMANDS:
            self.fail(f"{value!r} is not a layout; run {OTHER_COMMANDS[value]}.", param, ctx)
        return super().convert(value, param, ctx)


class _Size(click.ParamType):  # type: ignore[type-arg]
    """A size in config.json, NAME=N."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return name and value; refuse anything else."""
        match = re.fullmatch(r"(\w+)=(\d+)", value.strip())
        if match is None:
            self.fail(f"{value!r} is not NAME=N; pass for example head_dim=64.", param, ctx)
        return match[1], int(match[2])


# fmt: off
_OPTIONS_OF_COMPRESSION = (
    click.option("--keep", type=float, metavar="FRACTION",
                  help="Fraction of the numbers of the compressed part that is stored, in (0, 1]."),
    click.option("--max-error", type=float, metavar="E",
                  help="Choose the smallest size with a predicted error of at most E: relative error of the weights; "
                  "with --calibrate, 1 - cosine of the embeddings or the divergence (nats a token)."),
    click.option("--bits", type=float, metavar="BITS",
                  help="With --calibrate: average of stored bits per number of the compressed part, scales and biases "
                  "counted. 4 if no size is given. Beside --keep, both are met."),
    click.option("--flops", type=float, metavar="FRACTION",
                  help="With --calibrate: largest fraction of the multiplications per token in the compressed weights, "
                  "for speed. Beside --keep, both are met."),
    click.option("--what", type=click.Choice(WHAT), default="attention", show_default=True,
                  help="Part to compress; mlp: the matrices of the feed-forward layers; all: both, the token "
                  "embeddings and the unembedding."),
    click.option("--method", type=click.Choice(tuple(TABLE)), callback=lambda _context, _option, x: x or "",
                  show_default="with --calibrate: calibrated for --keep or --max-error, else quantized; without: heads",
                  help=methods_help()),
    click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
                  help="Calibration text file, representative of the model's use; a tenth is held out to measure on. "
                  "Needs torch and transformers."),
    click.option("--calibration-tokens", type=int, metavar="N", default=MAX_TOKENS, show_default=True,
                  help="With --calibrate: tokens read of each line, where longer ones are truncated; of a window, for "
                  "a language model."),
    click.option("--statistics", type=click.Path(path_type=Path), metavar="FILE",
                  help="With --calibrate: file of the calibration statistics, to resume after an interruption or "
                  "compress to another size."),
    click.option("--spill", type=click.Path(path_type=Path), metavar="FOLDER",
                  help="With --calibrate: folder for what is kept between the blocks of a model; an interrupted run "
                  "goes on from it, and it is removed in the end."),
    click.option("--max-memory", type=_Bytes(), metavar="BYTES",
                 help="Peak memory of the process, such as 4G or 4000M: more is kept on disk, and batches are smaller "
                 "if nothing else suffices, which changes the result."),
    click.option("--layout", type=_Layout((*LAYOUTS, *SMALLER_MODELS)), default="factored", show_default=True,
                  help="factored: store the factors; transformers loads them after import "
                  "tnlib_adapters.transformers_plugin. dense: store their product under the original names, at the "
                  "original size; loads anywhere. Smaller models, which load without tnlib: "
                  f"{'; '.join(row.help for row in SMALLER_MODELS.values())}."),
    click.option("--store", type=click.Choice(list(STORES)), default="float", show_default=True,
                  help="float: factors in the dtype of the weights; int8, int4, int3, int2: integers. With --calibrate "
                  "and no size, every weight has as many bits."),
)
# fmt: on


def _options_of_placement(command: Callable[..., None]) -> Callable[..., None]:
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
        help="Dtype of the weights while they run.",
    )
    return device(dtype(command))


def _options_of_compression(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that `compress` and `plan` share."""
    for option in reversed(_OPTIONS_OF_COMPRESSION):
        command = option(command)
    return command


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@_options_of_compression
@click.option("--size", "sizes", type=_Size(), multiple=True, metavar="NAME=N",
              help="Instead of --keep, for a layout that is a smaller model: a size in its config.json, "
              f"{sizes_help()}; may be given several times.")  # fmt: skip
@click.option("--workers", type=int, metavar="N",
              help="Share the work between N processes of this machine, of one thread each. Needs dask.")  # fmt: skip
@click.option("--cluster", metavar="ADDRESS",
              help="Share the work between the workers of a Dask scheduler, such as tcp://10.0.0.1:8786; all see IN, "
              "the folder of OUT and that of --spill under the same paths.")  # fmt: skip
@_options_of_placement
@click.option("--force", is_flag=True, help="Replace OUT if it is not empty.")
def compress(source: str, out: Path, sizes: tuple[tuple[str, int], ...], **options: Any) -> None:
    """Write a smaller copy of the checkpoint IN to OUT, with a report of sizes and errors.

    With --calibrate alone, weights are rounded to 4 bits on average; --bits sets another average. --keep stores fewer
    numbers instead, as factors, and beside --bits fewer numbers in fewer bits. --max-error chooses the smallest size
    within an error, and is met beside --keep or --bits.
    """
    with _command() as progress:
        from tnlib_adapters.compression.compress import compress as run

        report = run(_folder(source), out, sizes=dict(sizes), **options, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_report

    show_report(report, out)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@_options_of_compression
def plan(source: str, **options: Any) -> None:
    """Estimate what `compress` costs with these options: passes, time, memory and disk; nothing is written.

    A block of the model and decompositions of its sizes are timed on random weights, in less than a minute. Options
    that `compress` refuses before any work are refused in the same way.
    """
    with _command() as progress:
        from tnlib_adapters.compression.cost.estimate import estimate_cost

        cost = estimate_cost(_folder(source), **options, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_cost

    show_cost(cost)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--keep", "keeps", type=float, multiple=True, metavar="FRACTION", default=(0.75, 0.5, 0.25),
              show_default=True, help="Fraction to measure; may be given several times.")  # fmt: skip
@click.option("--bits", type=float, multiple=True, metavar="BITS", default=(4.0, 3.0), show_default=True,
              help="Average bits per number to measure, of quantized; may be given several times.")  # fmt: skip
@click.option("--method", "methods", type=click.Choice(tuple(TABLE)), multiple=True,
              help="Method to measure; may be given several times. All by default.")  # fmt: skip
@click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
              help="Text file: measure errors on a held-out tenth of it, of plain, whitened and calibrated methods in "
              f"float and in int8, of quantized, and of weights in plain int8 and by GPTQ. {_LINES_HELP}")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", default=Path("tnlib-compare"),
              show_default=True, help="Folder for compare.csv and compare.png.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FOLDER if it is not empty.")
def compare(source: str, keeps: tuple[float, ...], out: Path, **options: Any) -> None:
    """Compare methods at several sizes on the attention of the checkpoint IN, which is not changed.

    Without a text, errors are those of every layer's operators.
    """
    with _command() as progress:
        from tnlib_adapters.compression.compare.comparison_folder import write_comparison

        comparison = write_comparison(_folder(source), out, keeps=keeps, **options, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_comparison

    show_comparison(comparison, out)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("text", metavar="TEXT", type=click.Path(path_type=Path))
@_options_of_placement
def evaluate(source: str, out: Path, text: Path, **options: Any) -> None:
    """Compare the outputs of the checkpoint IN and its compression OUT on the text file TEXT.

    Embedding models: the cosine similarity of both embeddings of every line. Language models: the perplexity of
    both, and the divergence of their predictions in nats per token, in windows of 256 tokens. Lines are truncated at
    256 tokens. Needs torch and transformers.
    """
    with _command() as progress:
        from tnlib_adapters.compression.evaluation.evaluate import evaluate as run

        evaluation = run(_folder(source), out, text, **options, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_evaluation

    show_evaluation(evaluation)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--text", metavar="TEXT", help="Show the attention patterns of its heads on this text.")
@click.option("--text-file", type=click.Path(path_type=Path), metavar="FILE", help="The same, of a text file.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tnlib-inspect"), show_default=True,
              help=f"Folder for {INSPECT_PAGE}.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the folder if it is not empty.")
def inspect(source: str, text: str | None, text_file: Path | None, out: Path, force: bool) -> None:
    """Write an HTML page about the checkpoint IN: diagrams, head compositions, spectra, patterns on a text."""
    with _command() as progress:
        from tnlib_adapters.inspection.inspect import inspect as run

        page = run(_folder(source), out, text=text, text_file=text_file, force=force, progress=progress)
    click.echo(page)


@main.command()
@click.argument("base", metavar="BASE")
@click.argument("tuned", metavar="TUNED")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--rank", type=int, metavar="R", help="Rank of every weight.")
@click.option("--max-error", type=float, metavar="E",
              help="Instead of --rank: largest relative Frobenius error, with ranks of few numbers.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it is not empty.")
def adapter(base: str, tuned: str, out: Path, **options: Any) -> None:
    """Write the checkpoint TUNED minus its base BASE to OUT, as a LoRA adapter in the format of PEFT.

    Differences of the weights of attention and feed-forward layers are truncated by their singular values. BASE may
    hold the rounded weights of TUNED: an adapter corrects them.
    """
    with _command() as progress:
        from tnlib_adapters.compression.adapter.extract_adapter import extract_adapter

        extracted = extract_adapter(_folder(base), _folder(tuned), out, **options, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_adapter

    show_adapter(extracted, out)


@main.command()
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it is not empty.")
def export_onnx(source: str, out: Path, force: bool) -> None:
    """Write the encoder in the folder IN, compressed or not, to OUT as an ONNX graph with its tokenizer.

    onnxruntime runs OUT/onnx/model.onnx, and sentence-transformers OUT with backend="onnx". Low-rank weights are two
    matrix products, numbers float32. Needs torch, transformers and onnxscript.
    """
    with _command():
        from tnlib_adapters.transformers_plugin.export_onnx import export_onnx as run

        graph = run(_folder(source), out, force=force)
    click.echo(graph)


@main.command()
@click.argument("source", metavar="FILE")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--format", type=click.Choice(("tt", "tucker", "svd", "cp")), default="tt", show_default=True,
              help="Tensor train, Tucker, SVD of a matrix, or CP.")  # fmt: skip
@click.option("--rtol", type=float, metavar="E", help="Relative Frobenius error of the whole.")
@click.option("--max-rank", type=int, metavar="R", help="Cap on every rank; not for cp.")
@click.option("--rank", type=int, metavar="R", help="Number of components of cp.")
@click.option("--memory", type=_Bytes(), metavar="BYTES",
              help="Bytes that it may hold, such as 4G; a quarter of the free memory if left out.")  # fmt: skip
@click.option("--spill", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Folder for intermediate files, from which the same command resumes after a kill.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def decompose(source: str, out: Path, **options: Any) -> None:
    """Decompose the array in FILE, which may exceed memory, and write the result to OUT for tnlib.load.

    FILE is X.npy, the folder X.zarr, or X.h5:/path/of/the/dataset.
    """
    with _command() as progress:
        from tnlib_adapters.files.decomposed_files import decompose_file

        fit = decompose_file(source, out, **options, progress=progress)
    click.echo(fit)


@main.command()
@click.argument("file", metavar="FILE")
def info(file: str) -> None:
    """Print shape, ranks and size of an array file or of a file that decompose wrote."""
    with _command():
        from tnlib_adapters.files.decomposed_files import describe_file

        text = describe_file(file)
    click.echo(text)


def _folder(source: str) -> Path:
    from tnlib_adapters.data import builtin_path

    return builtin_path(BUILTIN[source]) if source in BUILTIN and not Path(source).exists() else Path(source)


@contextlib.contextmanager
def _command() -> Iterator[Progress]:
    """Yield the progress callback; errors become one sentence, and signals unwind the stack."""
    with _errors(), _Signals() as signals, _progress(signals.check) as progress:
        yield progress


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Escape characters that the encodings of both outputs lack, and report a standard output that is refused."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except OSError as problem:  # of printing: commands turn their own into status 2
        _discard_output()
        _refuse(
            f"standard output cannot be written to ({problem.strerror or problem}); the files that the command wrote "
            "are complete.",
            OUTPUT_REFUSED,
        )
    finally:
        for stream, errors in zip(streams, before, strict=True):
            with contextlib.suppress(OSError, ValueError):  # full, or closed
                stream.reconfigure(errors=errors)


def _discard_output() -> None:
    """Send what standard output still holds nowhere: Python would write it again at its end, with a traceback."""
    with contextlib.suppress(OSError, ValueError):  # no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class _Signals:
    """Raise exceptions on SIGINT, SIGTERM and SIGHUP, so that the stack unwinds."""

    def __init__(self) -> None:
        # handlers other than the defaults, of nohup or of a calling program, are not replaced
        defaults = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
        handlers = {getattr(signal, name): handler for name, handler in defaults.items() if hasattr(signal, name)}
        self._replaced = {
            number: default for number, default in handlers.items() if signal.getsignal(number) == default
        }
        self._received: list[int] = []

    def __enter__(self) -> Self:
        for number in self._replaced:
            signal.signal(number, self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        if kind is not None:  # a library being loaded may have replaced the exception by an ImportError
            self.check()

    def check(self) -> None:
        """Raise again if a library has caught the exception."""
        if self._received:
            raise _end_by(self._received[0]) from None

    def _end(self, number: int, _frame: object) -> None:
        self._received.append(number)
        raise _end_by(number)


def _end_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors that the user can fix into one sentence and exit status 2."""
    from tnlib import TnlibError

    try:
        yield
    except (TnlibError, ModuleNotFoundError) as problem:  # the message names the optional package
        _refuse(str(problem))
    except OSError as problem:
        reason = f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else "")
        _refuse(f"the system refused a file, nothing was written ({reason}).")


def _refuse(sentence: str, status: int = 2) -> NoReturn:
    with contextlib.suppress(OSError):  # standard error cannot be written to: the status remains
        click.echo(f"Error: {sentence}", err=True)
    sys.exit(status)


@contextlib.contextmanager
def _progress(check: Callable[[], None]) -> Iterator[Progress]:
    """Yield a function that calls `check` and shows (stage, done, total) as a bar on standard error."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars of transformers would overwrite ours
    from tnlib_adapters.compression.report.progress_bars import progress_bars

    with progress_bars(check) as show:
        yield show


if __name__ == "__main__":
    main()
