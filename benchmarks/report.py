"""Writes the pages and their pictures from what was measured; nobody edits the numbers by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cluster, large_models
from benchmarks.cases import cases
from benchmarks.machine import FORMULAS
from benchmarks.peers import REGISTRY
from benchmarks.results import COMPARISONS, OURS, Comparison, Results

CASE_COLUMNS = (
    "entry", "seconds", "best", "times tnlib", "true error", "ranks", "parameters", "spectrum", "call", "remark",
)  # fmt: skip


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def write(data: dict[str, Any], page: Path) -> None:
    """Write `page`, the pages of times and of large problems, and the pictures into a folder beside them."""
    results = Results(data)
    folder = page.parent / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    names = draw(results, folder)
    shown = {
        name: f"![{words}](pictures/bench-{name}.png)\n\n" + textwrap.fill(f"*{caption}*", 118)
        for name, (words, caption) in CAPTIONS.items()
        if name in names
    }
    for name, own in (("", summary(results, shown)), ("-speed", speed(results)), ("-scale", scale(results, shown))):
        page.with_stem(page.stem + name).write_text("\n".join(own).rstrip() + "\n", encoding="utf-8")


def draw(results: Results, folder: Path) -> list[str]:
    """Draw what was measured; the names of the pictures."""
    from benchmarks import pictures

    figures = {}
    if results.timed:
        figures["speed"] = pictures.speed(results)
    if results.data.get("growth"):
        figures["growth"] = pictures.growth(results)
    if any(one["group"] == "states" for one in results.data.get("accuracy", {}).get("subjects", [])):
        figures["states"] = pictures.accuracy(results, "states")
    for name, figure in figures.items():
        figure.savefig(folder / f"bench-{name}.png", dpi=150)
    return list(figures)


def summary(results: Results, shown: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the first page."""
    command = f"The page is written by `{results.data['command']}`; the numbers are not edited by hand."
    yield from ("# Benchmarks", "", ABOUT, command, "")
    if "speed" in shown:
        yield from (shown["speed"], "")
    yield from _machine(results)
    yield from _summary(results)
    if results.data.get("startup"):
        yield from _startup(results)
    yield from _bounds(results)
    yield from _skipped(results)


def speed(results: Results) -> Iterator[str]:
    """Yield the lines of the page of times."""
    yield from ("# Times of all libraries", "", SPEED, "")
    for case in results.timed:
        yield from case_table(results, case)


def scale(results: Results, shown: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the page of growth, memory, large problems and accuracy."""
    yield from ("# Growth, memory and accuracy", "", SCALE_ABOUT, "")
    if results.data.get("growth"):
        yield from _growth(results, shown.get("growth", ""))
    if results.data.get("memory"):
        yield from _memory(results)
    if results.data.get("past memory"):
        yield from _past_memory(results)
    if results.data.get("dask"):
        yield from _dask_workers(results)
    if results.data.get("large"):
        yield from large_models.section(results.data["large"])
    if results.data.get("workers"):
        yield from cluster.section(results.data["scale"], results.data["workers"])
    if "states" in shown:
        yield from ("## Accuracy", "", ACCURACY, "", shown["states"], "")


CAPTIONS = {  # alternative text and caption
    "speed": (
        "Time of other libraries relative to tnlib, one row per case, on a logarithmic axis",
        "Every dot is another library on the same data. To the right of the black line tnlib is faster; hollow dots "
        "miss the tolerance of the case.",
    ),
    "growth": (
        "Seconds against entries for tt_svd and against cores for round, with lines of slope one",
        "The time of tt_svd grows more slowly than the number of entries, that of round in proportion to the number of "
        "cores.",
    ),
    "states": (
        "Relative error against stored parameters for the ground states of two spin chains",
        "Lower and further to the left is better. In the Ising chain the tensor train needs the fewest parameters; in "
        "the Heisenberg chain it does at large errors, and at small ones the SVD of two halves needs slightly fewer.",
    ),
}

ABOUT = """\
This page compares speed, memory and accuracy of tnlib with those of other libraries (peers), on the same arrays and
tolerances, on one machine. "Gram mode" stands for singular values from the eigenvalues of a Gram matrix. The
[bound](#bounds) of a case estimates its shortest possible time from the rates of large products; a ratio to it may be
below 1. Small arrays and short operations are on the page of [everyday operations](benchmarks-everyday.md).
[Measurements](measurements.md) has date and commit of every table."""

SPEED = """\
The first line of every case states the input and, after the semicolon, the requested tolerance or rank. An entry is a
function of a library. All entries of a case run in turn, for several rounds: seconds are medians over the rounds,
"best" is the shortest time, and "times tnlib" is a ratio of medians of the same run. Data are converted to the class of
each library beforehand. The true error is computed from the dense array of the result, not taken from the library.
An entry whose error exceeds the tolerance of the case *misses* and is not counted as a peer. "SVD" marks singular
values from LAPACK's SVD of the data, which are accurate for small values as well; all others come from Gram matrices
or random sketches. Measured by `python -m benchmarks --part speed`, a single case by `python -m benchmarks --case
tt24`; the machine and the versions are on the page of the [benchmarks](benchmarks.md)."""

SCALE_ABOUT = """\
Parts of `make bench`, measured in runs of their own, so that a time may differ from that of the same case on the page
of [times](benchmarks-speed.md). [Measurements](measurements.md) has date and commit of every table."""

STARTUP = """\
Wall-clock time of whole processes, with compiled functions in the cache; of `import tnlib` alone, CPU time in a process
that has imported numpy:"""

ACCURACY = """\
The picture shows the relative Frobenius error against the number of stored parameters of all factors, as a fraction of
the entries of the array. A curve ends at the size of the array. Thick lines are formats of tnlib, thin dashed lines
those of peers. A state is split into the halves of its chain for the SVD, into its sites for tensor trains, and into
four groups of sites for Tucker and CP. For QK and OV matrices of heads the SVD is the best format."""


def _machine(results: Results) -> Iterator[str]:
    found = results.data.get("machine")
    if not found:
        return
    rates, blas = found["rates"], found["blas"]
    yield textwrap.fill(
        f"{found['cpu']}, {found['cores']} cores; measured in the same run: float64 products at "
        f"{rates['gemm64'] / 1e9:.0f} GFLOP/s, float32 at {rates['gemm32'] / 1e9:.0f} GFLOP/s, reading at "
        f"{rates['read'] / 1e9:.0f} GB/s. numpy's BLAS is {blas['name']} {blas['version']} on {blas['threads']} "
        f"thread{'s' * (blas['threads'] != 1)}. Python {found['python']}, "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + ".",
        width=118,
        break_on_hyphens=False,
    )
    yield ""


def _summary(results: Results) -> Iterator[str]:
    yield from ("## Summary", "")
    if results.data["scale"] != "full":
        yield from ("At this scale the numbers only show that everything runs.", "")
    yield from table(("case", "measure", "value"), (_compared(results, one) for one in COMPARISONS))


def _compared(results: Results, comparison: Comparison) -> tuple[str, ...]:
    value, peer = comparison.measured(results), comparison.against(results)
    return (
        comparison.subject,
        comparison.words + (f" ({peer})" if peer else ""),
        "not measured" if value is None else f"{value:.4g}",
    )


def case_table(results: Results, name: str) -> Iterator[str]:
    """Yield the lines of a case: its input, and the times and errors of all entries."""
    case = cases(results.data["scale"])[name]
    how = {entry.name: entry.how for entry in REGISTRY[name]}
    entries = sorted(results.timed[name].items(), key=lambda item: results.seconds(name, item[0]) or 0.0)
    yield from (f"## {name}", "", f"{case.about}.", "")
    yield from table(
        CASE_COLUMNS,
        (
            (
                f"**{entry}**" if entry == OURS else entry,
                _seconds(results.seconds(name, entry)),
                _seconds(min(one["seconds"])),
                "" if entry == OURS else _ratio(results.ratio(name, entry)),
                f"{one['error']:.4g}" + ("" if one["solved"] else ", *misses*"),
                *("" if one["stored"] == 1 else column for column in _columns(one)),
                *_call(how.get(entry, "")),
            )
            for entry, one in entries
        ),
    )


def _columns(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ranks, parameters and the spectrum of a result; a number has none of them."""
    return _ranks(one["ranks"]), f"{one['stored']:,}", "SVD" if one["exact"] else ""


def _call(how: str) -> tuple[str, str]:
    code, _, remark = how.partition("; ")
    return f"`{code}`" if code else "", remark


def _bounds(results: Results) -> Iterator[str]:
    if "machine" not in results.data:
        return
    yield from ("## Bounds", "")
    yield "The bound of a case is the time of reading plus the time of arithmetic, at the rates at the top of this"
    yield "page, of the following work, where n is the size of a leg or mode, r the rank of the result (of the"
    yield "operands of `inner`, of the terms of `sum`), R the bond of the input (of `apply`: of the product), and d the"
    yield "number of features:"
    yield ""
    formulas = dict.fromkeys(FORMULAS[case][0] for case in results.timed)
    for formula in formulas:
        yield f"- {', '.join(case for case in results.timed if FORMULAS[case][0] == formula)}: {formula}"
    yield ""
    rows = []
    for case in results.timed:
        least = results.bound(case)
        times = (least.reading, least.arithmetic, least.seconds, results.seconds(case))
        rows.append((case, *map(_seconds, times), _ratio(results.over_bound(case))))
    yield from table(("case", "reading (s)", "arithmetic (s)", "bound (s)", "tnlib (s)", "tnlib to bound"), rows)


def _growth(results: Results, picture: str) -> Iterator[str]:
    from benchmarks.growth import ABOUT

    yield from ("## Growth", "", picture, "")
    for function, one in results.data["growth"].items():
        yield from (f"{ABOUT[function]}; the exponent of the time is {results.slope(function):.3f}:", "")
        sizes = [f"2^{n.bit_length() - 1}" if function == "tt_svd" else str(n) for n in one["sizes"]]
        yield from table(("size", *sizes), [("seconds", *map(_seconds, one["seconds"]))])


def _memory(results: Results) -> Iterator[str]:
    yield from ("## Memory", "", "Peak resident memory in addition to the input and the result:", "")
    rows = (
        (one["function"], one["case"], one["dtype"], _megabytes(one["input"]), _megabytes(one["extra"]),
         f"{one['extra'] / one['input']:.2f}")
        for one in results.data["memory"]
    )  # fmt: skip
    yield from table(("function", "case", "dtype", "input", "additional", "fraction"), rows)


def _past_memory(results: Results) -> Iterator[str]:
    from benchmarks.memory import NOISE, RANK, RTOL

    found = results.data["past memory"]
    yield from ("## Past memory", "")
    words = (
        f"The input is a file of float64 numbers of shape 2 x 2 x ..., a train of rank {RANK} plus noise of norm ",
        f"{NOISE:g}. tt_svd runs with rtol {RTOL:g} and a limit of {_megabytes(found[0]['memory'])}. It reads the ",
        "file twice, and is compared ",
        "with two plain reads in the same process; the file is dropped from the page cache before each pair. ",
        "The peak is that of the whole process, libraries included. One pass is tt_svd with the same tolerance, ",
        f"`max_rank={RANK}` and `Storage(one_pass=True)`, after the other in the same process; its error is an ",
        "estimate.",
    )
    yield from textwrap.wrap("".join(words), 120)
    yield ""
    rows = (
        (f"{one['bytes'] / 2**30:g} GiB", _seconds(sum(one["reads"])), _seconds(one["seconds"]),
         _ratio(one["seconds"] / sum(one["reads"])), _megabytes(one["peak"]), f"{one['error']:.2g}", str(one["rank"]),
         _seconds(one["one pass"]), f"{one['estimate']:.2g}")
        for one in found
    )  # fmt: skip
    columns = ("file", "two plain reads (s)", "tt_svd (s)", "ratio", "peak memory", "error", "largest rank")
    columns += ("one pass (s)", "estimated error")
    yield from table(columns, rows)


def _dask_workers(results: Results) -> Iterator[str]:
    from benchmarks.dask_workers import CHUNKS, NOISE, RANK, RTOL

    found = results.data["dask"]
    yield from ("## Dask workers", "")
    words = (
        f"The input is a Dask array of {found['bytes'] / 2**30:g} GiB in {CHUNKS} chunks along the first leg, read ",
        f"from a file in the page cache. Its shape is {' x '.join(map(str, found['shape']))}, a train of rank {RANK} ",
        f"plus noise of norm {NOISE:g}. tt_svd runs with rtol {RTOL:g} in worker processes of one thread. ",
        "dask.array.linalg.svd_compressed computes rank ",
        f"{RANK} of the first unfolding. Best of {len(next(iter(found['seconds'].values())))} runs.",
    )
    yield from textwrap.wrap("".join(words), 120)
    yield ""
    rows = [(name, _seconds(min(own)), f"{found['errors'][name]:.3g}") for name, own in found["seconds"].items()]
    yield from table(("", "seconds", "error"), rows)


def _startup(results: Results) -> Iterator[str]:
    yield from ("## Start-up", "", STARTUP, "")
    rows = [(name, _seconds(value)) for name, value in results.data["startup"].items()]
    yield from table(("process", "seconds"), rows)


def _skipped(results: Results) -> Iterator[str]:
    found = results.data.get("speed", {}).get("skipped", {}) | results.data.get("accuracy", {}).get("skipped", {})
    if found:
        yield from ("## Skipped", "")
        yield from (f"- {what}: {why}" for what, why in found.items())
        if any(what.startswith("TransformerLens") for what in found):
            yield from ("", "TransformerLens is compared [on another page](circuits.md#beside-transformerlens).")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}x"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


def _ranks(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 6 else f"up to {max(ranks)}"
