"""Compression report as data, its summary, and its output on the terminal, with that of an evaluation."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tnlib_adapters.compression.engine_layouts import ENGINES
from tnlib_adapters.compression.methods.factorisation import RELATIVE
from tnlib_adapters.compression.methods.method_table import WITH_TEXT
from tnlib_adapters.compression.request import PAGE
from tnlib_adapters.compression.text import FEWEST_SEQUENCES
from tnlib_adapters.files.folder import path_text

if TYPE_CHECKING:
    from tnlib_adapters.compression.evaluate import Evaluation

Line = tuple[str, str, str]  # label, value before, value after; "" for no value

INT8 = "plain int8"  # the baseline
_NARROWEST = 80  # columns of a table, in which no word is cut
_FEWEST_TOKENS = 2000  # of a text: two batches of a fit, and perplexities that depend on the model
SUBJECTS = {
    "attention": "attention",
    "mlp": "feed-forward layers",
    "all": "attention, feed-forward and embeddings",
    "linear": "attention and feed-forward layers",
}


@dataclass(frozen=True)
class HeadReport:
    """One head: relative Frobenius errors of its operators, biases included, and their spectra.

    `kept` is the rank of the head's own factors, or None if factors are not per head.
    """

    layer: int
    head: int
    qk_error: float
    ov_error: float
    qk_spectrum: list[float]
    ov_spectrum: list[float]
    qk_kept: int | None = None
    ov_kept: int | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer: relative Frobenius errors over the operators of all heads, and its parameter count."""

    layer: int
    qk_error: float
    ov_error: float
    worst: float  # the largest error of any operator of any head
    n_before: int
    n_after: int


@dataclass(frozen=True)
class MatrixReport:
    """One compressed matrix outside the attention, and its bias.

    `role` is "feed-forward", "embedding", "unembedding", or "embedding and unembedding" of one matrix with both uses.
    """

    module: str
    role: str
    kind: str  # of its factors; "dense" if no factors are smaller
    n_before: int
    n_after: int


@dataclass(frozen=True)
class RoundedReport:
    """One weight that is stored as integers, whole or as two factors."""

    module: str
    of: str  # projections of an attention module, such as "q" or "qk"; otherwise ""
    bits: int
    rank: int | None  # of two factors; None without them
    group: int  # numbers that share a scale; 0 for those of a whole column or component, or of a row of a table
    n_bytes: int  # codes and scales, which the dense layout multiplies out


@dataclass(frozen=True)
class Report:
    """Report of one compression. Errors are measured on the written checkpoint, rounding to its dtype included.

    `n_after` counts the numbers of the factors. The dense layout stores their product, `n_before` numbers.
    """

    source: str
    model_type: str
    method: str
    layout: str
    keep: float | None  # requested fraction, None if an error was requested
    kept: float
    n_before: int
    n_after: int
    n_other: int  # numbers in all other tensors
    bytes_before: dict[str, int]  # of the weight files: "attention", "other", and "matrices" outside the attention
    bytes_after: dict[str, int]
    seconds: float
    peak_memory: int  # bytes, of the whole process
    layers: list[LayerReport] = field(repr=False)
    heads: list[HeadReport] = field(repr=False)
    left_out: list[str] = field(default_factory=list)  # files of IN that were not copied to OUT
    quality: dict[str, float] = field(default_factory=dict)  # quality measures of the whole model
    max_error: float | None = None  # requested error
    bits: float | None = None  # requested average of stored bits per parameter
    flops: dict[str, int] = field(default_factory=dict)  # multiplications per token of the compressed part, "before"
    # and "after", if the method counts them
    store: str = "float"
    what: str = "attention"  # the compressed part of the model: a key of `SUBJECTS`
    plain_bytes: int = 0  # of the same part with its weights rounded to int8
    plain_measured: float | None = None  # error of plain int8, where `measured` is on a text
    average_bits: float | None = None  # stored in the factored layout, per number of the source
    rounded: list[RoundedReport] = field(default_factory=list, repr=False)  # all weights, if the size is one in bits
    measure: str = RELATIVE  # error measure; see `Forecast`
    predicted: float | None = None  # error predicted by the method, without fine-tuning; None: no prediction
    measured: float | None = None  # error of the written checkpoint: of the weights, or on held-out text
    curve: dict[str, list[float]] = field(default_factory=dict, repr=False)  # every size of this method: "kept", or
    # "bits" per parameter, and "predicted"
    calibration: dict[str, int] = field(default_factory=dict)  # "window", the tokens of a sequence, number of
    # "sequences", of "truncated" ones (not for windows), of those "read" and "held_out", and of "batches"; {} without
    # a text
    load: str = ""  # Python code that loads OUT, with its path as `folder`
    matrices: list[MatrixReport] = field(default_factory=list, repr=False)  # outside the attention
    left_dense: dict[str, str] = field(default_factory=dict)  # embedding or unembedding -> the reason why it stays

    @property
    def subject(self) -> str:
        """Name of the compressed part of the model."""
        return SUBJECTS[self.what]

    @property
    def is_rounded(self) -> bool:
        """True if the size is the number of bits, not of numbers."""
        return bool(self.rounded)

    def compressed(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the compressed part, from `bytes_before` or `bytes_after`."""
        return sizes.get("matrices", 0) + (0 if self.what == "mlp" else sizes["attention"])

    @property
    def rounded_bytes_label(self) -> str:
        """Label of `n_bytes` of `rounded`: the dense layout stores the values of the integers in floats."""
        return "kB as integers" if self.layout == "dense" else "kB"

    @property
    def n_stored(self) -> int:
        """Numbers stored for the compressed part in OUT."""
        return self.n_before if self.layout == "dense" else self.n_after

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=1)


def summarise(report: Report) -> list[Line]:
    """Return sizes of the compressed part, errors, and cost of the compression."""
    cost = [("time", "", f"{report.seconds:.1f} s"), ("peak memory", "", f"{report.peak_memory / 1e6:.0f} MB")]
    return [*_sizes(report), *_text(report), *_errors(report), *cost]


def size_text(report: Report) -> str:
    """Return the stored bits per parameter of rounded weights, otherwise the fraction of the parameters, in words."""
    if report.is_rounded:
        return f"{report.subject} rounded to {report.average_bits:.2f} bits per parameter"
    return f"{report.kept:.4f} of the parameters of {report.subject} kept"


def headline(report: Report) -> str:
    """Return the bytes of all weights before and after, and the error; of the weights, if there was no text."""
    before, after = (sum(sizes.values()) for sizes in (report.bytes_before, report.bytes_after))
    sizes = f"all weights: {' -> '.join(before_and_after(before, after))}"
    is_on_text = report.plain_measured is not None
    if report.measured is None or not (is_on_text or report.measure == RELATIVE):
        return sizes
    return f"{sizes}; {report.measure} {report.measured:.2g} {'on held-out text' if is_on_text else 'of the weights'}"


def part_sizes(report: Report) -> str:
    """Return the bytes of the compressed part before and after, and the stored bits per parameter of factors."""
    before, after = report.compressed(report.bytes_before), report.compressed(report.bytes_after)
    bits = 8 * after / report.n_before
    sizes = f"{report.subject}: {' -> '.join(before_and_after(before, after))}, {bits:.2f} bits per parameter"
    if report.average_bits is None or report.layout not in ENGINES or bits < report.average_bits + 0.005:
        return sizes
    return f"{sizes}, of which {bits - report.average_bits:.2f} are indices and zero points of the layout"


def verdict(report: Report) -> str | None:
    """Return in one sentence how a compression compares with plain int8; None if it was not measured on a text."""
    size, error = report.plain_bytes, report.plain_measured
    if error is None or report.measured is None:
        return None
    n_bytes = report.compressed(report.bytes_after)
    smaller = n_bytes < size
    if report.measured < error:
        where = "fewer bytes" if smaller else f"{_ratio(n_bytes, size)} its bytes"
        return f"this is nearer to the original than {INT8} at {where}"
    if report.measured == error:
        where = "at fewer bytes" if smaller else f"but {INT8} takes no more bytes"
        return f"this is as near to the original as {INT8} {where}"
    if smaller:
        return f"this is smaller: {INT8} is nearer to the original, at {_ratio(size, n_bytes)} the bytes"
    advice = f"prefer {INT8 if report.is_rounded else 'rounding, --calibrate TEXT with --bits'}"
    return f"{INT8} is nearer to the original at {'as many' if n_bytes == size else 'fewer'} bytes: {advice}"


def _ratio(larger: int, smaller: int) -> str:
    return f"{larger / max(1, smaller):.3g} times"


def _sizes(report: Report) -> list[Line]:
    before, after, subject = report.bytes_before, report.bytes_after, report.subject
    numbers = (f"parameters in the {subject}", f"{report.n_before:,}", f"{report.n_stored:,}")
    lines = [
        (f"parameters in the {subject}", "", f"{report.n_before:,}") if report.is_rounded else numbers,
        (f"bytes of the {subject}", *before_and_after(report.compressed(before), report.compressed(after))),
        ("the same in plain int8", "", megabytes(report.plain_bytes)),
        ("all weights on disk", *before_and_after(sum(before.values()), sum(after.values()))),
    ]
    if report.is_rounded and report.average_bits is not None:
        share = 8 * report.compressed(before) / report.n_before
        dense = " before multiplying out" if report.layout == "dense" else ""
        lines.insert(1, (f"stored bits per parameter{dense}", f"{share:.2f}", f"{report.average_bits:.2f}"))
    if report.store != "float" and not report.is_rounded:
        lines.insert(1, ("factors stored in", "", report.store))
    if report.layout == "dense" and not report.is_rounded:
        lines.insert(1, ("parameters in the factors", "", f"{report.n_after:,}"))
    if report.rounded:
        counts = Counter((weight.rank is None, weight.bits) for weight in report.rounded)
        forms = [
            f"{n} {'in' if is_whole else 'as factors in'} {bits} bits" for (is_whole, bits), n in sorted(counts.items())
        ]
        lines.append(("weights by bits", "", ", ".join(forms)))
    lines += [
        (f"parameters of {matrix.module} ({matrix.role})", f"{matrix.n_before:,}", f"{matrix.n_after:,}")
        for matrix in report.matrices
        if "embedding" in matrix.role and not report.is_rounded
    ]
    if report.flops and report.layout == "factored":
        old, new = (f"{report.flops[key]:,}" for key in ("before", "after"))
        lines.append(("multiplications per token", old, new))
    lines += [(f"{module} stays as it is", reason, "") for module, reason in report.left_dense.items()]
    if report.left_out:
        lines.append(("files left out", ", ".join(report.left_out), ""))
    return lines


def _text(report: Report) -> list[Line]:
    if not report.calibration:
        return []
    text = report.calibration
    how = f"windows of {text['window']:,} tokens"
    if "truncated" in text:
        how = f"lines, {text['truncated']:,} of all truncated at {text['window']:,} tokens"
    read = f"{text['read']:,} of " if text["read"] < text["sequences"] else ""
    lines = [("calibration text", "", f"{read}{text['sequences']:,} {how}; {text['held_out']:,} more held out")]
    if text["held_out"] == 0:
        lines.append(
            ("not measured on held-out text", "", f"pass a text of at least {FEWEST_SEQUENCES} {how.split()[0]}")
        )
    if text["batches"] == 1 and report.method in WITH_TEXT:  # the fit has no other batch to be chosen on
        lines.append(("fit not validated", "", f"the text fills one batch; pass at least {_FEWEST_TOKENS:,} tokens"))
    return lines


def _errors(report: Report) -> list[Line]:
    errors = {"predicted": report.predicted, "measured": report.measured}
    errors[f"of {INT8}"] = report.plain_measured
    lines = [(f"{report.measure}, {name}", "", f"{value:.4g}") for name, value in errors.items() if value is not None]
    shown = (f"{report.measure}, on held-out text", *(key for key in report.quality if "predicted" in key))
    quality = {key: value for key, value in report.quality.items() if key not in shown}
    for key, value in quality.items():
        before, after = key.replace(", after", ", before"), key.replace(", before", ", after")
        if before == after or not {before, after} <= quality.keys():
            lines.append((key, "", f"{value:.3f}"))
        elif key == before:
            lines.append((key.replace(", before", ""), f"{value:.3f}", f"{quality[after]:.3f}"))
    return lines


def megabytes(n_bytes: int) -> str:
    """Return a size in MB, in kB below 0.1 MB.

    >>> megabytes(91_190_000), megabytes(33_280)
    ('91.19 MB', '33.28 kB')
    """
    return before_and_after(n_bytes, n_bytes)[0]


def before_and_after(before: int, after: int) -> tuple[str, str]:
    """Return two sizes in MB, or both in kB if one is below 0.1 MB.

    >>> before_and_after(130_000, 14_540)
    ('130.00 kB', '14.54 kB')
    """
    name, unit = ("MB", 1e6) if min(before, after) >= 100_000 else ("kB", 1e3)
    return f"{before / unit:,.2f} {name}", f"{after / unit:,.2f} {name}"


def show_report(report: Report, out: Path) -> None:
    """Print the size of all weights and the error, those of plain int8, the errors of every layer, and the summary."""
    click.echo(headline(report))
    if remark := verdict(report):
        click.echo(part_sizes(report))
        bits = f"{8 * report.plain_bytes / report.n_before:.2f} bits"
        click.echo(f"  {INT8}: {megabytes(report.plain_bytes)}, {bits}; {report.plain_measured:.2g}")
        click.echo(f"{remark[0].upper()}{remark[1:]}.")
        if report.max_error is not None and report.measured is not None and report.measured > report.max_error:
            click.echo(
                f"The measured error exceeds --max-error {report.max_error:g}, which bounds the predicted one: lower "
                "it, or calibrate on more text."
            )
        click.echo()
    after = "in factors" if report.layout == "dense" else "after"
    counts = ("bits of q k v o", report.rounded_bytes_label) if report.is_rounded else ("parameters before", after)
    rows = [
        [str(layer.layer), *(f"{e:.4f}" for e in (layer.qk_error, layer.ov_error, layer.worst)), *cells]
        for layer, cells in zip(report.layers, _sizes_of_layers(report), strict=True)
    ]
    _print_table(
        f"{report.model_type}, method {report.method}: {size_text(report)}",
        ["layer", "QK error", "OV error", "worst head", *counts],
        [rows, [["all", "", "", "", *_total(report)]]],
    )
    if report.measured is not None and report.measure != RELATIVE:
        click.echo("Errors of QK and OV operators are large where the output depends little on them.")
    lines = summarise(report)
    width = max(len(name) for name, _, _ in lines)
    for name, before, now in lines:
        click.echo(f"{name:<{width}}  {f'{before} -> {now}' if before and now else before or now}")
    code = report.load.replace("(folder", f"({path_text(out)!r}")
    click.echo(f"written to {path_text(out)}, with {PAGE}; load it with:")
    click.echo("".join(f"\n    {statement}" for statement in code.split("; "))[1:])


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the measures by name."""
    sequences = "windows" if evaluation.cosine is None else "lines"
    click.echo(f"{evaluation.n_texts:,} {sequences}, {evaluation.n_tokens:,} tokens in total")
    for name, value in evaluation.measures().items():
        click.echo(f"{name}   {value:.4f}")
    if evaluation.cosine is None and evaluation.n_tokens < _FEWEST_TOKENS:
        click.echo(f"a short text: measures of fewer than {_FEWEST_TOKENS:,} tokens vary with the text; add text")


def _print_table(title: str, columns: list[str], groups: list[list[list[str]]]) -> None:
    """Print rows in groups separated by lines, right-aligned."""
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
    Console(width=max(_NARROWEST, Console().width)).print(table)


def _sizes_of_layers(report: Report) -> list[tuple[str, str]]:
    """Return two cells for every layer: parameters before and after, or the bits of the projections and their kB."""
    if not report.is_rounded:
        return [(f"{layer.n_before:,}", f"{layer.n_after:,}") for layer in report.layers]
    projections = [weight for weight in report.rounded if weight.of]
    layers = [list(layer) for _, layer in itertools.groupby(projections, key=lambda weight: weight.module)]
    if not layers:
        return [("", "")] * len(report.layers)
    bits = [[f"{w.bits}" if w.rank is None else f"{w.bits}(rank {w.rank})" for w in layer] for layer in layers]
    return [(" ".join(of_layer), _kb(layer)) for of_layer, layer in zip(bits, layers, strict=True)]


def _total(report: Report) -> tuple[str, str]:
    if not report.is_rounded:
        return f"{report.n_before:,}", f"{report.n_after:,}"
    return f"{report.average_bits:.2f} on average", _kb(report.rounded)


def _kb(rounded: Sequence[RoundedReport]) -> str:
    return f"{sum(weight.n_bytes for weight in rounded) / 1e3:,.1f}"
