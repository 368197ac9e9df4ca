"""Command line: arguments, progress bars and tables; each command calls one public function.

Exit statuses: 0 success; 1 the reader of a pipe has gone; 2 wrong arguments or input, nothing was written;
3 the work is done, but standard output cannot be written to; 130, 129, 143 ended by a signal.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from tnlib_adapters.cli_options import (
    METHODS_HELP,
    Bytes,
    arguments_of,
    options_of_compression,
    options_of_placement,
)
from tnlib_adapters.cli_session import command, output
from tnlib_adapters.compression.options import LAYOUTS
from tnlib_adapters.inspection import PAGE as INSPECT_PAGE

BUILTIN = {"builtin": "induction", "builtin-llama": "llama"}
_IN_HELP = (
    "IN is a checkpoint folder, the name of a model in the local cache of the Hugging Face hub, or one of the trained "
    "models that are part of the package: " + ", ".join(f'"{name}"' for name in BUILTIN) + "."
)


_EXAMPLES = """\b
Examples:
  tnlib demo
  tnlib compress IN OUT --calibrate TEXT
  tnlib plan IN --calibrate TEXT
  tnlib evaluate IN OUT TEXT
  tnlib export-onnx IN OUT
  tnlib decompose X.npy OUT.safetensors --rtol 1e-6
  tnlib info OUT.safetensors
  tnlib inspect IN --text "Mary gave the book to John" --out FOLDER
"""


_HELP_OPTIONS = ["-h", "--help"]


class _Command(click.Command):
    """A command whose summary is not cut in the list of commands, with lists below its options."""

    def __init__(self, *args: Any, lists: Mapping[str, Mapping[str, str]] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.context_settings["help_option_names"] = _HELP_OPTIONS
        self.lists = lists or {}

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the lists."""
        super().format_options(context, formatter)
        for title, rows in self.lists.items():
            with formatter.section(title):
                formatter.write_dl([(name, f"{words[0].upper()}{words[1:]}.") for name, words in rows.items()])

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first paragraph of the help."""
        return " ".join((self.help or "").split("\n\n")[0].split())


class _Commands(click.Group):
    command_class = _Command

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command; an output that cannot be written is one sentence, and no encoding lacks a character."""
        with output():
            return super().main(*args, **options)


@click.group(cls=_Commands, context_settings={"help_option_names": _HELP_OPTIONS}, epilog=_EXAMPLES)
@click.version_option(package_name="tnlib")
def main() -> None:
    """Tensor decompositions of transformer checkpoints and arrays: compress, evaluate, inspect, decompose."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("tnlib-demo"), show_default=True,
              help="Folder for the pictures and the compressed model.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the folder if it is not empty.")
def demo(out: Path, force: bool) -> None:
    """Compress and inspect a model, and explain the results.

    The model is sentence-transformers/all-MiniLM-L6-v2, in two minutes, if the local cache of Hugging Face has it and
    torch is installed; otherwise a small trained model of the package, in half a minute. Nothing is downloaded.
    """
    with command() as progress:
        from tnlib_adapters.demo_cached import cached_model, cached_story, run_cached_demo

        cached = cached_model()
        if cached is None:
            from tnlib_adapters.demo import run_demo, story

            paragraphs = partial(story, run_demo(out, force=force, progress=progress))
        else:
            paragraphs = partial(cached_story, run_cached_demo(cached, out, force=force, progress=progress))
    click.echo("\n\n".join(paragraphs(min(100, max(60, shutil.get_terminal_size((100, 24)).columns)))))


@main.command(epilog=_IN_HELP, lists={"Methods": METHODS_HELP, "Layouts": LAYOUTS})
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@options_of_compression
@click.option("--workers", type=int, metavar="N",
              help="Decompose and round the weights in N processes of this machine, of one thread each.")  # fmt: skip
@click.option("--cluster", metavar="ADDRESS",
              help="The same by the workers of a Dask scheduler, such as tcp://10.0.0.1:8786.")  # fmt: skip
@options_of_placement
@click.option("--force", is_flag=True, help="Replace OUT if it is not empty.")
def compress(source: str, out: Path, **options: Any) -> None:
    """Write a smaller copy of the checkpoint IN to OUT, with a report of sizes and errors.

    With --calibrate alone, weights are rounded to 4 bits on average; --bits sets another average. --keep stores fewer
    parameters instead, as low-rank factors; --bits with --keep bounds both. --max-error selects the smallest size
    within an error, and can be combined with --keep or --bits.
    """
    with command() as progress:
        from tnlib_adapters.compression.compress import compress as run
        from tnlib_adapters.compression.executor import open_executor

        of_executor = {name: options.pop(name) for name in ("cluster", "workers")}
        arguments = arguments_of(**options, progress=progress)
        with open_executor(**of_executor) as executor:
            arguments["run"] = replace(arguments["run"], executor=executor)
            report = run(_folder("compress", source), out, **arguments)
    from tnlib_adapters.compression.report import show_report

    show_report(report, out)


@main.command(epilog=_IN_HELP, lists={"Methods": METHODS_HELP, "Layouts": LAYOUTS})
@click.argument("source", metavar="IN")
@options_of_compression
@options_of_placement
def plan(source: str, **options: Any) -> None:
    """Print the sizes of `compress` with these options, and about how long it will take; nothing is written.

    One block of the model is timed on the text, and multiplied by the number of blocks and of passes. Options that
    `compress` refuses before any work are refused in the same way.
    """
    with command() as progress:
        from tnlib_adapters.compression.plan_run import plan as run

        planned = run(_folder("plan", source), **arguments_of(**options, progress=progress))
    click.echo(planned)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT")
@click.argument("text", metavar="TEXT", type=click.Path(path_type=Path))
@options_of_placement
def evaluate(source: str, out: str, text: Path, **options: Any) -> None:
    """Compare the outputs of the checkpoint IN and its compression OUT on the text file TEXT.

    For embedding models, it prints the cosine similarity of the two embeddings of every line; lines are truncated at
    256 tokens. For language models, it prints the perplexity of both models and the KL divergence of their predictions
    in nats per token, in windows of 256 tokens. Folders of --layout gguf are not read. Needs torch and transformers.
    """
    with command() as progress:
        from tnlib_adapters.compression.evaluate import evaluate as run

        before, after = _folder("evaluate", source), _folder("evaluate", out, "OUT")
        evaluation = run(before, after, text, **options, progress=progress)
    from tnlib_adapters.compression.report import show_evaluation

    show_evaluation(evaluation)


@main.command(epilog=_IN_HELP)
@click.argument("source", metavar="IN")
@click.option("--text", metavar="TEXT", help="Text on which to show the attention patterns of all heads.")
@click.option("--text-file", type=click.Path(path_type=Path), metavar="FILE", help="File with the text.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tnlib-inspect"), show_default=True,
              help=f"Folder for {INSPECT_PAGE}.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the folder if it is not empty.")
def inspect(source: str, text: str | None, text_file: Path | None, out: Path, force: bool) -> None:
    """Write an HTML page about the checkpoint IN: diagrams, head composition, spectra, attention patterns."""
    with command() as progress:
        from tnlib_adapters.inspection.inspect import inspect as run

        page = run(_folder("inspect", source), out, text=text, text_file=text_file, force=force, progress=progress)
    click.echo(page)


@main.command()
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it is not empty.")
def export_onnx(source: str, out: Path, force: bool) -> None:
    """Write the encoder in the folder IN, compressed or not, to OUT as an ONNX graph with its tokenizer.

    onnxruntime runs OUT/onnx/model.onnx, and sentence-transformers OUT with backend="onnx". In the graph, a
    low-rank weight is two matrix products. Values are float32, except the integers of the layout onnxruntime. Needs
    torch, transformers and onnxscript.
    """
    with command():
        from tnlib_adapters.transformers_plugin.onnx_export import export_onnx as run

        graph = run(_folder("export-onnx", source), out, force=force)
    click.echo(graph)


@main.command()
@click.argument("source", metavar="FILE")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--format", type=click.Choice(("tt", "tucker", "svd", "cp")), default="tt", show_default=True,
              help="Tensor train, Tucker, SVD of a matrix, or CP.")  # fmt: skip
@click.option("--rtol", type=float, metavar="E", help="Relative Frobenius error of the result.")
@click.option("--max-rank", type=int, metavar="R", help="Largest rank; not for cp.")
@click.option("--rank", type=int, metavar="R", help="Number of components of cp.")
@click.option("--memory", type=Bytes(), metavar="BYTES",
              help="Largest memory, such as 4G; a quarter of the free memory by default.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Folder for the state of the run, from which an interrupted command resumes.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def decompose(source: str, out: Path, **options: Any) -> None:
    """Decompose the array in FILE, which may exceed memory, and write the result to OUT for tnlib.load.

    FILE is X.npy, the folder X.zarr, or X.h5:/path/of/the/dataset.
    """
    with command() as progress:
        from tnlib_adapters.files.array_files import decompose_file

        fit = decompose_file(source, out, **options, progress=progress)
    click.echo(fit)


@main.command()
@click.argument("file", metavar="FILE")
def info(file: str) -> None:
    """Print shape, ranks and size of an array file or of a file that decompose wrote."""
    with command():
        from tnlib_adapters.files.array_files import describe_file

        text = describe_file(file)
    click.echo(text)


def _folder(command_name: str, source: str, argument: str = "IN") -> Path:
    """Return the folder of a built-in model, of a path, or of a model in the local cache of the hub."""
    from tnlib_adapters.data import builtin_path
    from tnlib_adapters.files.folder import find_folder

    if source in BUILTIN and not Path(source).exists():
        return builtin_path(BUILTIN[source])
    return find_folder(command_name, argument, source, tuple(BUILTIN))


if __name__ == "__main__":
    main()
