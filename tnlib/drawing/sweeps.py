"""Diagrams of the steps of a TT-SVD sweep."""

from __future__ import annotations

from typing import Any

from tnlib._registry import require
from tnlib.drawing.diagram import Diagram


def sweep_steps(tt: Any) -> dict[str, Diagram]:
    """Return one diagram per step of the TT-SVD sweep that produces `tt` from a dense tensor, by title.

    Step k is an SVD of the remainder, on the right of the isometries of the steps before.

    Parameters
    ----------
    tt
        A left-canonical TensorTrain of 2 to 10 cores, as `tt_svd` returns it.

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
    steps: dict[str, Diagram] = require("sweep_steps", "sweep_steps", "tt", tt, "use tnlib.tt_svd")(tt)
    return steps
