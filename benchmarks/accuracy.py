"""Error against stored numbers, for every format, on real operators and states."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import tnlib
from benchmarks import truth
from benchmarks.operators import Subject, subjects
from benchmarks.peers import quimb_cores, tnlib_cores

POINTS = {"full": 12, "small": 4}
TOLERANCES = {"operators": (0.9, 0.05), "states": (0.5, 1e-8)}
COMPONENTS = 128  # of a CP at most
SWEEPS = 60  # of any iteration: a swamp would take the time of all the rest

Curve = list[tuple[float, float]]  # (stored numbers / entries of the array, relative error), means over the arrays


@dataclass(frozen=True)
class Format:
    """One format: how it sees a matrix, and how it is fitted at a tolerance or a rank."""

    name: str
    layout: str  # of the results, see truth.py
    view: Callable[[np.ndarray, Subject], np.ndarray]
    fit: Callable[[np.ndarray, Any], Sequence[np.ndarray]]
    by_rank: bool = False
    package: str = "tnlib"


def _matrix(a: np.ndarray, _: Subject) -> np.ndarray:
    return a


def _train(a: np.ndarray, subject: Subject) -> np.ndarray:
    return a.reshape(subject.row_legs + subject.column_legs)


def _paired(a: np.ndarray, subject: Subject) -> np.ndarray:
    """Legs (m[k], n[k]) beside each other: a TT-matrix is a train over the pairs."""
    d = len(subject.row_legs)
    pairs = _train(a, subject).transpose([leg for k in range(d) for leg in (k, d + k)])
    return pairs.reshape([m * n for m, n in zip(subject.row_legs, subject.column_legs, strict=True)])


def _tensor(a: np.ndarray, subject: Subject) -> np.ndarray:
    return a.reshape(subject.legs)


def _svd(a: np.ndarray, rtol: float) -> Sequence[np.ndarray]:
    u, s, vh = tnlib.svd(a, rtol=rtol).value
    return u, s, vh


def _tt_svd(x: np.ndarray, rtol: float) -> Sequence[np.ndarray]:
    return tnlib_cores(tnlib.tt_svd(x, rtol=rtol))


def _tucker(x: np.ndarray, rtol: float) -> Sequence[np.ndarray]:
    value = tnlib.tucker(x, rtol=rtol).value
    return value.core, *value.factors


def _cp(x: np.ndarray, rank: int) -> Sequence[np.ndarray]:
    value = tnlib.cp(x, rank, n_iter=SWEEPS).value
    return value.weights, *value.factors


def _quimb(x: np.ndarray, rtol: float) -> Sequence[np.ndarray]:
    states = importlib.import_module("quimb.tensor").MatrixProductState
    return quimb_cores(states.from_dense(x, dims=x.shape, cutoff=rtol**2 / (x.ndim - 1), cutoff_mode="rsum2"))


def _tensorly_tucker(x: np.ndarray, rtol: float) -> Sequence[np.ndarray]:
    """It takes no tolerance: at the ranks that tnlib needs for it."""
    tucker = importlib.import_module("tensorly.decomposition").tucker
    core, factors = tucker(x, rank=list(tnlib.tucker(x, rtol=rtol).value.ranks), n_iter_max=10)
    return core, *factors


def _tensorly_cp(x: np.ndarray, rank: int) -> Sequence[np.ndarray]:
    parafac = importlib.import_module("tensorly.decomposition").parafac
    weights, factors = parafac(x, rank, init="random", random_state=0, n_iter_max=SWEEPS)
    return weights, *factors


FORMATS = (
    Format("svd", "svd", _matrix, _svd),
    Format("tt_svd", "train", _train, _tt_svd),
    Format("ttm_svd", "train", _paired, _tt_svd),
    Format("tucker", "tucker", _tensor, _tucker),
    Format("cp", "cp", _tensor, _cp, by_rank=True),
    Format("quimb MPS", "train", _train, _quimb, package="quimb"),
    Format("tensorly tucker", "tucker", _tensor, _tensorly_tucker, package="tensorly"),
    Format("tensorly parafac", "cp", _tensor, _tensorly_cp, by_rank=True, package="tensorly"),
)


def measure(scale: str) -> dict[str, Any]:
    """Return {"subjects": [{name, group, n_entries, curves: {format: curve}}], "skipped": {what: why}}."""
    found, skipped = subjects(scale)
    skipped |= {one.name: f"{one.package} is not installed" for one in FORMATS if not find_spec(one.package)}
    curves = [
        {one.name: curve for one in FORMATS if one.name not in skipped and (curve := trace(one, subject, scale))}
        for subject in found
    ]
    return {
        "subjects": [
            {"name": subject.name, "group": subject.group, "n_entries": subject.matrices[0].size, "curves": its_curves}
            for subject, its_curves in zip(found, curves, strict=True)
        ],
        "skipped": skipped,
    }


def trace(form: Format, subject: Subject, scale: str) -> Curve:
    """Return the curve of one format up to where it stores as many numbers as the array has."""
    arrays = [form.view(a, subject) for a in subject.matrices]
    points, (loose, tight) = POINTS[scale], TOLERANCES[subject.group]
    steps = np.geomspace(loose, tight, points)
    if form.by_rank:
        steps = sorted({round(rank) for rank in np.geomspace(1, COMPONENTS, points)})
    curve: Curve = []
    for step in steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the sweeps end is what was asked for
            results = [[np.asarray(a) for a in form.fit(x, step)] for x in arrays]
        stored = np.mean([truth.stored(result) / x.size for x, result in zip(arrays, results, strict=True)])
        if stored > 1:
            break
        errors = [truth.error(form.layout, x, result) for x, result in zip(arrays, results, strict=True)]
        curve.append((float(stored), float(np.mean(errors))))
    return curve
