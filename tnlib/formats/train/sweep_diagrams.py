"""Diagrams of the steps of TT-SVD."""

from __future__ import annotations

import math

from tnlib._errors import ArgumentError
from tnlib.drawing.diagram import Diagram, Leg, Node
from tnlib.formats.train.diagram import core_directions
from tnlib.formats.train.format import TensorTrain

_STEP = 1.3
_REACH = 0.75  # length of an open leg
_MAX_CORES = 10


def sweep_steps(tt: TensorTrain) -> dict[str, Diagram]:
    """Return one diagram per step of the sweep that produces a left-canonical `tt` of 2 to 10 cores, by title."""
    count = len(tt.cores)
    if not 2 <= count <= _MAX_CORES:
        raise ArgumentError(
            f"sweep_steps: tt must have 2 to {_MAX_CORES} cores, got {count}; draw the train with tnlib.draw."
        )
    directions, _ = core_directions(tt.cores, count - 1)
    if 0 in directions[:-1]:
        raise ArgumentError(
            f"sweep_steps: tt must be left-canonical, got core {directions.index(0)} that is no isometry; "
            "pass tnlib.canonicalize(tt, d - 1)."
        )
    titles = ["dense", *(f"step {k}" for k in range(1, count))]
    return {title: _step(tt, k) for k, title in enumerate(titles)}


def _step(tt: TensorTrain, n_isometries: int) -> Diagram:
    """Return the diagram of the first isometries and the remainder, which has all other legs."""
    last = len(tt.cores) - 1
    nodes = [Node("isometry", str(k), (k * _STEP, 0.0), (1.0, 0.0)) for k in range(n_isometries)]
    nodes.append(Node("tensor", str(last) if n_isometries == last else "rest", (n_isometries * _STEP, 0.0)))
    legs = [Leg(k - 1, k, f"bond{k}", tt.ranks[k], towards=k) for k in range(1, n_isometries + 1)]
    for k, n in enumerate(tt.shape):
        via = ((k * _STEP, -0.45),) if k > n_isometries else ()
        legs.append(Leg(min(k, n_isometries), None, f"k{k}", n, (k * _STEP, -_REACH), via))
    stored = sum(core.size for core in tt.cores[:n_isometries])
    remaining = tt.ranks[n_isometries] * math.prod(tt.shape[n_isometries:])
    return Diagram((*nodes,), (*legs,), f"{stored + remaining:,} numbers")
