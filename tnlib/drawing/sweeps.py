"""Diagrams of the steps of a TT-SVD sweep."""

from __future__ import annotations

import math

from tnlib._errors import ArgumentError
from tnlib._fit import wrong_type
from tnlib._format import Format
from tnlib._registry import format_class
from tnlib.drawing.diagram import Diagram, Leg, Node
from tnlib.drawing.node_kinds import is_isometric_from

_STEP = 1.3
_REACH = 0.75  # length of an open leg
_MAX_CORES = 10


def sweep_steps(tt: Format) -> dict[str, Diagram]:
    """Return one diagram per step of the TT-SVD sweep that produces `tt` from a dense tensor, by title.

    `tt` is a left-canonical TensorTrain of 2 to 10 cores, as `tt_svd` returns it. Step k is an SVD of the remainder, on
    the right of the isometries of the steps before.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> steps = sweep_steps(tnlib.tt_svd(np.arange(24.0).reshape(2, 3, 4)).value)
    >>> list(steps), [[node.kind for node in step.nodes] for step in steps.values()]
    (['dense', 'step 1', 'step 2'], [['tensor'], ['isometry', 'tensor'], ['isometry', 'isometry', 'tensor']])
    """
    if not isinstance(tt, format_class("TensorTrain")):
        raise wrong_type("sweep_steps", "tt", "a TensorTrain", tt, "use tnlib.tt_svd")
    count = tt.ndim
    if not 2 <= count <= _MAX_CORES:
        raise ArgumentError(
            f"sweep_steps: tt must have 2 to {_MAX_CORES} cores, got {count}; draw the train with tnlib.draw."
        )
    for k, core in enumerate(tt.arrays()[:-1]):
        if not is_isometric_from(core, (2,)):
            raise ArgumentError(
                f"sweep_steps: tt must be left-canonical, got core {k} that is no isometry; "
                "pass tnlib.canonicalize(tt, d - 1)."
            )
    titles = ["dense", *(f"step {k}" for k in range(1, count))]
    return {title: _step(tt, k) for k, title in enumerate(titles)}


def _step(tt: Format, n_isometries: int) -> Diagram:
    """Return the diagram of the first isometries and the remainder, which has all other legs."""
    last = tt.ndim - 1
    nodes = [Node("isometry", str(k), (k * _STEP, 0.0), (1.0, 0.0)) for k in range(n_isometries)]
    nodes.append(Node("tensor", str(last) if n_isometries == last else "rest", (n_isometries * _STEP, 0.0)))
    legs = []
    for k, n in enumerate(tt.shape):
        if 0 < k <= n_isometries:
            legs.append(Leg(k - 1, k, f"bond{k}", tt.ranks[k], towards=k))
        via = ((k * _STEP, -0.45),) if k > n_isometries else ()
        legs.append(Leg(min(k, n_isometries), None, f"k{k}", n, (k * _STEP, -_REACH), via))
    stored = sum(core.size for core in tt.arrays()[:n_isometries])
    remaining = tt.ranks[n_isometries] * math.prod(tt.shape[n_isometries:])
    return Diagram((*nodes,), (*legs,), f"{stored + remaining:,} numbers")
