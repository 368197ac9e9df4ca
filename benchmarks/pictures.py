"""The pictures of docs/benchmarks.md, drawn with matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.growth import ABOUT
from benchmarks.results import OURS, Results

BLUE, RED, GREEN, PURPLE, OCHRE, GREY = "#3b6ea5", "#c8553d", "#5b8c5a", "#8a6bb1", "#d9a441", "#b8b8b8"
COLOURS = {"svd": GREY, "tt_svd": BLUE, "ttm_svd": GREEN, "tucker": RED, "cp": PURPLE}
PEERS = {"quimb MPS": BLUE, "tensorly tucker": RED, "tensorly parafac": PURPLE}
Y_FLOOR = {"operators": 0.04, "states": 1e-8}  # below, the curves show the precision that the data came in


def speed(results: Results) -> Figure:
    """Draw the time of every entry of every case, and the bound."""
    timed = results.timed
    columns = 2
    rows = -(-len(timed) // columns)
    figure = Figure(figsize=(11, 0.4 + 2.35 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for ax, case in zip(axes, timed, strict=False):
        _draw_case(ax, results, case)
    for ax in axes[len(timed) :]:
        ax.set_visible(False)
    return figure


def _draw_case(ax: Axes, results: Results, case: str) -> None:
    entries = sorted(results.timed[case], key=lambda name: results.seconds(case, name) or 0.0)
    seconds = [results.seconds(case, name) for name in entries]
    solved = [results.timed[case][name]["solved"] for name in entries]
    colours = [RED if name == OURS else BLUE if ok else "white" for name, ok in zip(entries, solved, strict=True)]
    ax.barh(entries, seconds, color=colours, edgecolor=[c if c != "white" else GREY for c in colours])
    for y, (name, value, ok) in enumerate(zip(entries, seconds, solved, strict=True)):
        ratio = results.ratio(case, name)
        words = f" {EngFormatter('s', places=1)(value)}" + (f", {ratio:.3g}x" if ratio and name != OURS else "")
        ax.text(value, y, words + ("" if ok else ", misses"), va="center", fontsize=8)
    least = results.bound(case)
    if least is not None:
        ax.axvline(least.seconds, color="black", ls="--", lw=1)
    low = min([*seconds, *([least.seconds] if least else [])])
    ax.set(title=case, xscale="log", xlabel="seconds, dashed: bound", xlim=(low / 2, max(seconds) * 30))
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)


def growth(results: Results) -> Figure:
    """Draw time against size for tt_svd and round, with a line of slope 1."""
    found: dict[str, Any] = results.data["growth"]
    labels = {"tt_svd": "entries", "round": "cores"}
    figure = Figure(figsize=(5.2 * len(found), 4), layout="constrained")
    for ax, (function, one) in zip(np.atleast_1d(figure.subplots(1, len(found))), found.items(), strict=True):
        sizes, seconds = np.array(one["sizes"], float), np.array(one["seconds"])
        ax.loglog(sizes, seconds, "o-", color=RED, label=f"measured, slope {results.slope(function):.2f}")
        ax.loglog(sizes, seconds[-1] / sizes[-1] * sizes, "--", color=GREY, label="slope 1")
        ax.set(title=ABOUT[function].replace(", ", ",\n", 1), xlabel=labels[function], ylabel="seconds")
        ax.title.set_fontsize(9)
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def accuracy(results: Results, group: str) -> Figure:
    """Draw error against stored numbers for every subject of a group, one panel each."""
    subjects = [one for one in results.data["accuracy"]["subjects"] if one["group"] == group]
    figure = Figure(figsize=(1 + 3.8 * len(subjects), 4.2), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(subjects), sharey=True))
    for ax, subject in zip(axes, subjects, strict=True):
        for name, curve in subject["curves"].items():
            thin = name in PEERS
            style = {"color": PEERS[name] if thin else COLOURS[name], "lw": 0.8 if thin else 1.8}
            ax.plot(
                *zip(*curve, strict=True), ls="--" if thin else "-", marker=None if thin else ".", label=name, **style
            )
        ax.set(title=subject["name"], xlabel="stored numbers / entries", xscale="log", yscale="log")
        ax.set_ylim(bottom=Y_FLOOR[group], top=1.2)
        ax.title.set_fontsize(9)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative error")
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure
