"""The command line: reads arguments, shows progress and tables; all work is done elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from tnlib_adapters.compression.choices import LAYOUTS, METHODS, STORES, WHAT
from tnlib_adapters.inspection.names import PAGE as INSPECT_PAGE

if TYPE_CHECKING:
    from tnlib_adapters.compression.compare.by_layer import Comparison
    from tnlib_adapters.compression.compare.on_text import TextComparison
    from tnlib_adapters.compression.progress import Progress

BUILTIN = {"builtin": "induction", "builtin-llama": "llama"}
_IN_HELP = (
    "IN is a checkpoint folder, or one of the trained models that are part of the package: "
    + ", ".join(f'"{name}"' for name in BUILTIN)
    + "."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tnlib")
def main() -> None:
    """Attention weights of transformer checkpoints as low-rank tensors."""


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--keep", type=float, metavar="FRACTION",
              help="Fraction of the numbers in what is compressed that is still stored, in (0, 1].")  # fmt: skip
@click.option("--max-error", type=float, metavar="E",
              help="The smallest size whose predicted error is within E: the relative error of the weights, or, with "
              "--calibrate, 1 - cosine of the embeddings or nats a token of the predictions.")  # fmt: skip
@click.option("--what", type=click.Choice(WHAT), default="attention", show_default=True,
              help="What to compress; mlp: the matrices of the feed-forward layers; all: both, and the embeddings of "
              "tokens.")  # fmt: skip
@click.option("--method", type=click.Choice((*METHODS, "calibrated")), callback=lambda _context, _option, x: x or "",
              show_default="calibrated with --calibrate, otherwise heads",
              help="heads: each head's QK and OV operator as one; matrix: each weight; ttm, tucker, cp: the formats of "
              "these names. With --calibrate all but cp see inputs; calibrated goes further, and fits.")  # fmt: skip
@click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
              help="Text file like what the model is to be used on: what matters on it is kept; calibrated fits "
              "every layer to it. A tenth is held out to measure on. Needs torch, transformers.")  # fmt: skip
@click.option("--statistics", type=click.Path(path_type=Path), metavar="FILE",
              help="With --calibrate: where to keep what the text shows of the weights, for another size or after an "
              "interruption.")  # fmt: skip
@click.option("--layout", type=click.Choice(LAYOUTS), default="factored", show_default=True,
              help="factored: store the factors; transformers reads them after import "
              "tnlib_adapters.transformers_plugin. dense: the multiplied-out weights under their old names, as "
              "large as before; loads anywhere.")  # fmt: skip
@click.option("--store", type=click.Choice(STORES), default="float", show_default=True,
              help="float: factors in the dtype of the weights; int8: in one byte a number.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it has files in it.")
def compress(source: str, out: Path, **asked: Any) -> None:
    """Write to OUT a smaller copy of the checkpoint IN, with a report of what that costs.

    How small is said by --keep or --max-error; with both, both are met.
    """
    with _command() as progress:
        from tnlib_adapters.compression.compress import compress as run

        report = run(_folder(source), out, **asked, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_report

    show_report(report, out)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--keep", "keeps", type=float, multiple=True, metavar="FRACTION", default=(0.75, 0.5, 0.25),
              show_default=True, help="A fraction to try; may be given several times.")  # fmt: skip
@click.option("--method", "methods", type=click.Choice((*METHODS, "calibrated")), multiple=True,
              help="A method to try; may be given several times. All by default.")  # fmt: skip
@click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
              help="Text file: what is measured instead is what methods lose on a tenth of it, plain, whitened by the "
              "rest and calibrated on it, in float and in int8, beside weights that are only rounded.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", default=Path("tnlib-compare"),
              show_default=True, help="Where to write compare.csv and compare.png.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FOLDER if it has files in it.")
def compare(
    source: str, keeps: tuple[float, ...], methods: tuple[str, ...], calibrate: Path | None, out: Path, force: bool
) -> None:
    """Measure methods at several fractions on the attention of the checkpoint IN; it is not compressed.

    Without a text that is the error of every layer's operators.
    """
    with _command() as progress:
        from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
        from tnlib_adapters.compression.calibration.text import read_text
        from tnlib_adapters.compression.compare.by_layer import compare as run
        from tnlib_adapters.compression.compare.on_text import compare_on_text
        from tnlib_adapters.compression.compare.pictures import draw_by_layer, draw_on_text
        from tnlib_adapters.files.atomic_folder import check_target, whole_folder

        text = None if calibrate is None else read_text("compare", "calibrate", calibrate)
        folder, fractions = _folder(source), sorted(set(keeps), reverse=True)
        checkpoint = open_checkpoint(folder)
        check_target("compare", out, folder, force=force)
        found: Comparison | TextComparison
        if text is None:
            found = run(checkpoint, fractions, methods, progress)
            picture = draw_by_layer(found)
        else:
            found = compare_on_text(checkpoint, fractions, text, methods, progress)
            picture = draw_on_text(found)
        with whole_folder(out) as partial:
            found.write_csv(partial / "compare.csv")
            picture.savefig(partial / "compare.png", dpi=150)
    from tnlib_adapters.compression.report.terminal import show_comparison

    show_comparison(found, out)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("text", metavar="TEXT", type=click.Path(path_type=Path))
def evaluate(source: str, out: Path, text: Path) -> None:
    """Measure on the text file TEXT how far OUT, a compression of the checkpoint IN, lies from it.

    Of a model that embeds texts: the cosine of both embeddings of every line. Of one that predicts tokens: the
    perplexity of both, and the divergence of their predictions in nats a token. Needs torch and transformers.
    """
    with _command() as progress:
        from tnlib_adapters.compression.evaluation.evaluate import evaluate as run

        found = run(_folder(source), out, text, progress=progress)
    from tnlib_adapters.compression.report.terminal import show_evaluation

    show_evaluation(found)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--text", metavar="TEXT", help="Show what its heads attend to in this text.")
@click.option("--text-file", type=click.Path(path_type=Path), metavar="FILE", help="The same, of a text file.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tnlib-inspect"), show_default=True,
              help=f"Folder for {INSPECT_PAGE}.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the folder if it has files in it.")
def inspect(source: str, text: str | None, text_file: Path | None, out: Path, force: bool) -> None:
    """Write a page on what is inside the checkpoint IN: diagrams, compositions, spectra, patterns on a text."""
    with _command() as progress:
        from tnlib_adapters.inspection.inspect import inspect as run

        found = run(_folder(source), out, text=text, text_file=text_file, force=force, progress=progress)
    click.echo(found)


def _folder(source: str) -> Path:
    from tnlib_adapters.data.builtin import builtin_path

    return builtin_path(BUILTIN[source]) if source in BUILTIN and not Path(source).exists() else Path(source)


@contextlib.contextmanager
def _command() -> Iterator[Progress]:
    """Yield what shows progress; whatever ends the command leaves a sentence and no unfinished folder."""
    with _errors(), _PoliteEnds() as ends, _progress(ends.check) as progress:
        yield progress


class _PoliteEnds:
    """Lets an interrupt, a kill and a closed terminal unwind the stack."""

    def __init__(self) -> None:
        # other than by default where nohup, or a program that calls this one, has its own way with it
        defaults = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
        handlers = {getattr(signal, name): handler for name, handler in defaults.items() if hasattr(signal, name)}
        self._replaced = {number: one for number, one in handlers.items() if signal.getsignal(number) == one}
        self._received: list[int] = []

    def __enter__(self) -> Self:
        for number in self._replaced:
            signal.signal(number, self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        if kind is not None:  # a library that was being loaded may have put an ImportError of its own in its place
            self.check()

    def check(self) -> None:
        """End now if a library has caught what was to end the command."""
        if self._received:
            raise _end_by(self._received[0]) from None

    def _end(self, number: int, _frame: object) -> None:
        self._received.append(number)
        raise _end_by(number)


def _end_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn what a user can mend into one sentence and exit status 2."""
    from tnlib import TnlibError

    try:
        yield
    except (TnlibError, ModuleNotFoundError) as problem:  # of an optional package, whoever needs it says so
        click.echo(f"Error: {problem}", err=True)
        sys.exit(2)
    except OSError as problem:
        what = f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else "")
        click.echo(f"Error: the system refused a file, nothing was written ({what}).", err=True)
        sys.exit(2)


@contextlib.contextmanager
def _progress(check: Callable[[], None]) -> Iterator[Progress]:
    """Yield a function that shows (stage, done, total) as a bar on standard error; it calls `check` first."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers draws over ours when it loads a model
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        check()
        bars.start()  # only now: a refusal that comes first stands alone, without an empty line
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


if __name__ == "__main__":
    main()
