"""The pictures of docs/benchmarks.md, drawn with matplotlib."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from benchmarks.growth import ABOUT
from benchmarks.results import OURS, Results

BLUE, RED, GREEN, PURPLE, OCHRE, GREY = "#3b6ea5", "#c8553d", "#5b8c5a", "#8a6bb1", "#d9a441", "#b8b8b8"
COLOURS = {"svd": GREY, "tt_svd": BLUE, "ttm_svd": GREEN, "tucker": RED, "cp": PURPLE}
PEERS = {"quimb MPS": BLUE, "tensorly tucker": RED, "tensorly parafac": PURPLE}
WIDTH = 6.6  # inches: labels of 10 points stay readable on the screen of a phone
CASES = {
    "tt24": "TT-SVD",
    "tt32": "TT-SVD",
    "tt20": "TT-SVD",
    "tucker4": "Tucker",
    "tucker3": "Tucker",
    "cp3": "CP",
    "svd": "truncated SVD",
    "round": "rounding",
    "inner": "inner product",
    "add": "rounded sum of two",
    "apply": "operator times train",
    "cross": "TT-cross",
    "sum": "rounded sum of many",
    "heads": "spectra of heads",
    "composition": "composition scores",
}
LIBRARIES = {  # colour and marker
    "quimb": ("#0072b2", "o"),
    "TeNPy": ("#e69f00", "D"),
    "torchTT": ("#009e73", "s"),
    "tensorly": ("#c8553d", "^"),
    "teneva": ("#8a6bb1", "v"),
    "pyttb": ("#b07d62", "P"),
    "scipy": ("0.35", "X"),
    "torch": ("#cc79a7", "<"),
    "sklearn": ("#6aa6d6", ">"),
    "TransformerLens": ("#333333", "*"),
}
Y_FLOOR = {"operators": 0.04, "states": 1e-8}  # below, the curves show the precision that the data came in


def speed(results: Results) -> Figure:
    """Draw the time of every entry relative to that of tnlib, one row for every case that other libraries run."""
    peers = {case: [name for name in results.timed[case] if not name.startswith(OURS)] for case in results.timed}
    compared = [case for case, names in peers.items() if names]
    figure = Figure(figsize=(WIDTH, 1.6 + 0.42 * len(compared)), layout="constrained")
    ax = figure.subplots()
    shown = set()
    for row, case in enumerate(compared):
        for name in peers[case]:
            library = name.partition(",")[0].split()[0]
            color, marker = LIBRARIES[library]
            edges = (
                {"mfc": color, "mec": "white"}
                if results.timed[case][name]["solved"]
                else {"mfc": "white", "mec": color}
            )
            ax.plot(results.ratio(case, name), row, marker, ms=8, mew=0.8, **edges)
            shown.add(library)
    ax.axvline(1, color="black", lw=1.5)
    ax.annotate(OURS, (1, 1.01), xycoords=("data", "axes fraction"), ha="center", weight="bold")
    ax.set(
        xscale="log",
        xlabel="time relative to tnlib (to the right of 1: tnlib is faster)",
        ylim=(len(compared) - 0.4, -0.6),
    )
    ax.set_yticks(range(len(compared)), [f"{CASES[case]} ({case})" for case in compared])
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
    ax.grid(axis="x", which="both", lw=0.3)
    ax.grid(axis="y", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    dots = {name: look for name, look in LIBRARIES.items() if name in shown}
    handles = {name: Line2D([], [], ls="", marker=marker, color=color, ms=7) for name, (color, marker) in dots.items()}
    handles["misses the tolerance"] = Line2D([], [], ls="", marker="o", color="0.3", mfc="white", ms=7)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def growth(results: Results) -> Figure:
    """Draw time against size for tt_svd and round, with a line of slope 1."""
    found: dict[str, Any] = results.data["growth"]
    labels = {"tt_svd": "entries", "round": "cores"}
    figure = Figure(figsize=(WIDTH, 3.4 * len(found)), layout="constrained")
    for ax, (function, one) in zip(np.atleast_1d(figure.subplots(len(found), 1)), found.items(), strict=True):
        sizes, seconds = np.array(one["sizes"], float), np.array(one["seconds"])
        ax.loglog(sizes, seconds, "o-", color=RED, label=f"measured, slope {results.slope(function):.2f}")
        ax.loglog(sizes, seconds[-1] / sizes[-1] * sizes, "--", color=GREY, label="slope 1")
        ax.set(title=fill(ABOUT[function], 72), xlabel=labels[function], ylabel="seconds")
        ax.title.set_fontsize(10)
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def accuracy(results: Results, group: str) -> Figure:
    """Draw error against stored numbers for every subject of a group, one panel each."""
    subjects = [one for one in results.data["accuracy"]["subjects"] if one["group"] == group]
    figure = Figure(figsize=(WIDTH, 0.8 + 3.2 * len(subjects)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(subjects), 1, sharex=True))
    for ax, subject in zip(axes, subjects, strict=True):
        for name, curve in subject["curves"].items():
            thin = name in PEERS
            style = {"color": PEERS[name] if thin else COLOURS[name], "lw": 0.8 if thin else 1.8}
            ax.plot(
                *zip(*curve, strict=True), ls="--" if thin else "-", marker=None if thin else ".", label=name, **style
            )
        ax.set(title=subject["name"], ylabel="relative error", xscale="log", yscale="log")
        ax.set_ylim(bottom=Y_FLOOR[group], top=1.2)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("stored parameters / entries of the array")
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure
