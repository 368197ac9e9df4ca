"""A tensor on its way to a train: one diagram per step of the sweep."""

from __future__ import annotations

import math

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib.drawing.chains import core_directions
from tnlib.drawing.graph import Diagram, Leg, Node
from tnlib.formats.train import TensorTrain

_STEP = 1.3
_REACH = 0.75
_MOST = 10


def sweep_steps(tt: TensorTrain) -> dict[str, Diagram]:
    """Return, by their titles, the diagrams of the sweep that makes `tt` of a dense tensor; `draw` takes them all.

    Step k is an SVD of what is left, on the right of the isometries that there are already: they need not be
    multiplied in, because they keep norms.

    Parameters
    ----------
    tt
        A train of 2 to 10 cores, left-canonical as `tt_svd` returns it. Ranks and isometries are those of its cores.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no TensorTrain, has fewer or more cores, or a core before the last is not left-isometric.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> steps = sweep_steps(tnlib.tt_svd(np.arange(24.0).reshape(2, 3, 4)).value)
    >>> list(steps), [[node.kind for node in step.nodes] for step in steps.values()]
    (['dense', 'step 1', 'step 2'], [['tensor'], ['isometry', 'tensor'], ['isometry', 'isometry', 'tensor']])
    """
    if not isinstance(tt, TensorTrain):
        raise ArgumentTypeError(f"sweep_steps: tt must be a TensorTrain, got {type(tt).__name__}; use tnlib.tt_svd.")
    count = len(tt.cores)
    if not 2 <= count <= _MOST:
        raise ArgumentError(f"sweep_steps: tt must have 2 to {_MOST} cores, got {count}; draw it as it is.")
    signs, _ = core_directions(tt.cores, count - 1)
    if 0 in signs[:-1]:
        raise ArgumentError(
            f"sweep_steps: tt must be left-canonical, got core {signs.index(0)} that is no isometry; "
            "pass tnlib.canonicalize(tt, d - 1)."
        )
    titles = ["dense", *(f"step {k}" for k in range(1, count))]
    return {title: _step(tt, k) for k, title in enumerate(titles)}


def _step(tt: TensorTrain, done: int) -> Diagram:
    """Describe `done` isometries and, with all the other legs, what is left."""
    count = len(tt.cores)
    nodes = [Node("isometry", str(k), (k * _STEP, 0.0), (1.0, 0.0)) for k in range(done)]
    nodes.append(Node("tensor", str(done) if done == count - 1 else "rest", (done * _STEP, 0.0)))
    legs = [Leg(k - 1, k, f"bond{k}", tt.ranks[k], towards=k) for k in range(1, done + 1)]
    for k, n in enumerate(tt.shape):
        corner = ((k * _STEP, -0.45),) if k > done else ()
        legs.append(Leg(min(k, done), None, f"k{k}", n, (k * _STEP, -_REACH), corner))
    numbers = sum(math.prod(core.shape) for core in tt.cores[:done]) + tt.ranks[done] * math.prod(tt.shape[done:])
    return Diagram((*nodes,), (*legs,), f"{numbers:,} numbers")
