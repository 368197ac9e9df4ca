"""The command line: reads arguments, shows progress and tables; all work is done elsewhere."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tnlib_adapters.compression.names import LAYOUTS, METHODS, PAGE, STORES, WHAT
from tnlib_adapters.inspection.names import PAGE as INSPECT_PAGE

if TYPE_CHECKING:
    from tnlib_adapters.compression.compare import Comparison
    from tnlib_adapters.compression.compare_text import TextComparison
    from tnlib_adapters.compression.evaluate import Evaluation
    from tnlib_adapters.compression.progress import Progress
    from tnlib_adapters.compression.report import LayerReport, Report

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
    # A polite end (kill, a closed terminal) unwinds the stack, so that no unfinished folder stays behind.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # other than by default where nohup, or a program that calls this one, has its own way with it
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
            click.get_current_context().call_on_close(functools.partial(signal.signal, number, signal.SIG_DFL))


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--keep", type=float, help="Fraction of the attention's numbers still stored, in (0, 1].")
@click.option("--max-error", type=float, metavar="E",
              help="Instead: the smallest size whose predicted error is within E.")  # fmt: skip
@click.option("--method", type=click.Choice((*METHODS, "whitened")), default="heads", show_default=True,
              help="heads: each head's QK and OV operator as one; matrix: each weight; or a format. With --calibrate "
              "heads, or to compare matrix or whitened (heads), where the inputs are.")  # fmt: skip
@click.option("--layout", type=click.Choice(LAYOUTS), default="factored", show_default=True,
              help="factored: store the factors; dense: the multiplied-out weights under their old names.")  # fmt: skip
@click.option("--what", type=click.Choice(WHAT), default="attention", show_default=True,
              help="What to compress: mlp are the feed-forward layers, all adds embeddings.")  # fmt: skip
@click.option("--store", type=click.Choice(STORES), default="float", show_default=True,
              help="float: factors in the dtype of the weights; int8: one byte a number.")  # fmt: skip
@click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
              help="Text file: heads keep what it shows to matter, and layers are fitted on it.")  # fmt: skip
@click.option("--statistics", type=click.Path(path_type=Path), metavar="FILE",
              help="Where to keep what the text shows, for another size or after an interruption.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it has files in it.")
def compress(
    source: str,
    out: Path,
    keep: float | None,
    max_error: float | None,
    method: str,
    layout: str,
    store: str,
    what: str,
    calibrate: Path | None,
    statistics: Path | None,
    force: bool,
) -> None:
    """Write to OUT a copy of the checkpoint IN whose attention stores fewer numbers."""
    with _errors(), _progress() as progress:
        from tnlib_adapters.compression.compress import compress as run

        report = run(
            *(_folder(source), out),
            keep=keep,
            max_error=max_error,
            method=method,
            layout=layout,
            store=store,
            what=what,
            calibrate=calibrate,
            statistics=statistics,
            force=force,
            progress=progress,
        )
    _show_report(report, out)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--keep", "keeps", type=float, multiple=True, default=(0.75, 0.5, 0.25), show_default=True,
              help="A fraction to try; may be given several times.")  # fmt: skip
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True, help="A method to try; all by default.")
@click.option("--calibrate", type=click.Path(path_type=Path), metavar="TEXT",
              help="Text file: what matrices and heads lose on it, plain, whitened, calibrated, in int8.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("tnlib-compare"), show_default=True,
              help="Folder for compare.csv and compare.png.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the folder if it has files in it.")
def compare(
    source: str, keeps: tuple[float, ...], methods: tuple[str, ...], calibrate: Path | None, out: Path, force: bool
) -> None:
    """Measure every method at several fractions on the checkpoint IN; nothing is compressed."""
    if calibrate is not None:
        _compare_on_text(source, keeps, methods, calibrate, out, force=force)
        return
    with _errors(), _progress() as progress:
        from tnlib_adapters.attention.checkpoint import open_checkpoint
        from tnlib_adapters.compression.compare import compare as run
        from tnlib_adapters.compression.compare import draw
        from tnlib_adapters.compression.whole import check_target, whole_folder

        folder = _folder(source)
        checkpoint = open_checkpoint(folder)
        check_target("compare", out, folder, force=force)
        found = run(checkpoint, sorted(set(keeps), reverse=True), methods, progress)
        with whole_folder(out) as partial:
            found.write_csv(partial / "compare.csv")
            draw(found).savefig(partial / "compare.png", dpi=150)
    _show_comparison(found, out)


def _compare_on_text(
    source: str, keeps: tuple[float, ...], methods: tuple[str, ...], file: Path, out: Path, *, force: bool
) -> None:
    with _errors(), _progress() as progress:
        from tnlib_adapters.attention.checkpoint import open_checkpoint
        from tnlib_adapters.compression.compare_text import compare_on_text
        from tnlib_adapters.compression.pictures import draw_on_text
        from tnlib_adapters.compression.text import read_text
        from tnlib_adapters.compression.whole import check_target, whole_folder

        folder, text = _folder(source), read_text("compare", "calibrate", file)
        checkpoint = open_checkpoint(folder)
        check_target("compare", out, folder, force=force)
        found = compare_on_text(checkpoint, sorted(set(keeps), reverse=True), text, methods, progress)
        with whole_folder(out) as partial:
            found.write_csv(partial / "compare.csv")
            draw_on_text(found).savefig(partial / "compare.png", dpi=150)
    _show_text_comparison(found, out)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("text", metavar="TEXT", type=click.Path(path_type=Path))
def evaluate(source: str, out: Path, text: Path) -> None:
    """Measure on the file TEXT what the compressed checkpoint OUT lost of IN."""
    with _errors(), _progress() as progress:
        from tnlib_adapters.compression.evaluate import evaluate as run

        found = run(_folder(source), out, text, progress=progress)
    _show_evaluation(found)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--text", metavar="TEXT", help="Show what its heads attend to in this text.")
@click.option("--text-file", type=click.Path(path_type=Path), metavar="FILE", help="The same, of a text file.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tnlib-inspect"), show_default=True,
              help=f"Folder for {INSPECT_PAGE}.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the folder if it has files in it.")
def inspect(source: str, text: str | None, text_file: Path | None, out: Path, force: bool) -> None:
    """Write a page on what is inside the checkpoint IN: diagrams, compositions, spectra, patterns on a text."""
    with _errors(), _progress() as progress:
        from tnlib_adapters.inspection.inspect import inspect as run

        found = run(_folder(source), out, text=text, text_file=text_file, force=force, progress=progress)
    click.echo(found)


def _folder(source: str) -> Path:
    from tnlib_adapters.data.builtin import builtin_path

    return builtin_path(BUILTIN[source]) if source in BUILTIN and not Path(source).exists() else Path(source)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn what a user can mend into one sentence and exit status 2."""
    from tnlib import TnlibError

    try:
        yield
    except TnlibError as problem:
        click.echo(f"Error: {problem}", err=True)
        sys.exit(2)
    except OSError as problem:
        what = f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else "")
        click.echo(f"Error: the system refused a file, nothing was written ({what}).", err=True)
        sys.exit(2)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a function that shows (stage, done, total) as a bar on standard error."""
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
        bars.start()  # only now: a refusal that comes first stands alone, without an empty line
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


def _print_table(title: str, columns: list[str], groups: list[list[list[str]]]) -> None:
    """Print rows in groups with a line between them, all to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for column in table.columns:
        column.justify = "right"
    for group in groups:
        for row in group:
            table.add_row(*row)
        table.add_section()
    click.echo(title)
    Console().print(table)


def _show_report(report: Report, out: Path) -> None:
    from tnlib_adapters.compression.plain_int8 import verdict

    after = "in factors" if report.layout == "dense" else "after"
    whose = f"{report.subject}'" if report.subject.endswith("s") else f"{report.subject}'s"
    rows = [
        [str(one.layer), *(f"{e:.4f}" for e in (one.qk_error, one.ov_error, one.worst)), *_counts(one)]
        for one in report.layers
    ]
    _print_table(
        f"{report.model_type}, method {report.method}: {report.kept:.4f} of the {whose} numbers kept",
        ["layer", "QK error", "OV error", "worst head", "numbers before", after],
        [rows, [["all", "", "", "", *_counts(report)]]],
    )
    before, after = (f"{sum(sizes.values()) / 1e6:.2f} MB" for sizes in (report.bytes_before, report.bytes_after))
    click.echo(f"weights on disk   {before} -> {after}")
    shown = {"predicted": report.predicted, "measured": report.measured}
    for name, value in shown.items():
        click.echo(f"{report.measure}, {name}   {value:.4g}" if value is not None else "", nl=value is not None)
    for name, value in report.quality.items():
        click.echo(f"{name}   {value:.3f}")
    before, after = (f"{report.compressed(n) / 1e6:.2f} MB" for n in (report.bytes_before, report.bytes_after))
    click.echo(f"of the {report.subject}   {before} -> {after}, plain int8 {report.plain_bytes / 1e6:.2f} MB")
    if said := verdict(report):
        click.echo(said)
    click.echo(f"{report.seconds:.1f} s, peak memory {report.peak_memory / 1e6:.0f} MB")
    click.echo(f"written to {out}, with {PAGE}")


def _counts(one: Report | LayerReport) -> list[str]:
    return [f"{one.n_before:,}", f"{one.n_after:,}"]


def _show_evaluation(found: Evaluation) -> None:
    click.echo(f"{found.n_texts:,} texts of together {found.n_tokens:,} tokens")
    for name, value in found.measures().items():
        click.echo(f"{name}   {value:.4f}")


def _show_text_comparison(found: TextComparison, out: Path) -> None:
    groups: dict[str, list[list[str]]] = {}
    for row in found.rows:
        worst = "" if row.worst is None else f"{row.worst:.2g}"
        floats = (f"{row.n_bytes / 1e6:.2f}", f"{row.error:.4f}", worst)
        int8 = (f"{row.n_bytes_int8 / 1e6:.2f}", f"{row.error_int8:.4f}", f"{row.seconds:.1f}")
        groups.setdefault(row.method, []).append([row.method, f"{row.kept:.4f}", *floats, *int8])
    columns = ["method", "kept", "MB", "error", "worst", "MB in int8", "error in int8", "s"]
    _print_table(f"{found.measure} on held-out text; MB of the attention", columns, list(groups.values()))
    for what, reason in found.refused.items():
        click.echo(f"without {what}: {reason}")
    click.echo(f"written to {out}: compare.csv, compare.png")


def _show_comparison(found: Comparison, out: Path) -> None:
    groups: dict[tuple[str, float], list[list[str]]] = {}
    for row in found.rows:
        errors = (f"{row.qk_error:.4f}", f"{row.ov_error:.4f}")
        cells = [row.method, f"{row.keep:g}", str(row.layer), *errors, f"{row.n_after:,}", f"{row.seconds:.2f}"]
        groups.setdefault((row.method, row.keep), []).append(cells)
    columns = ["method", "keep", "layer", "QK error", "OV error", "numbers", "seconds"]
    _print_table("Relative error of the operators", columns, list(groups.values()))
    for what, reason in found.refused.items():
        click.echo(f"without {what}: {reason}")
    click.echo(f"written to {out}: compare.csv, compare.png")


if __name__ == "__main__":
    main()
