"""Diagrams of the steps of TT-SVD."""

from __future__ import annotations

import numpy as np
import pytest

import tnlib
from tnlib.drawing import sweep_steps


def test_every_step_adds_an_isometry() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 2))
    tt = tnlib.tt_svd(x).value
    steps = sweep_steps(tt)
    assert list(steps) == ["dense", "step 1", "step 2", "step 3"]
    for n_isometries, step in enumerate(steps.values()):
        assert [n.kind for n in step.nodes] == [*["isometry"] * n_isometries, "tensor"]
        assert step.bonds == tuple((f"bond{k}", tt.ranks[k]) for k in range(1, n_isometries + 1))
        assert step.open_legs == tuple((f"k{k}", n) for k, n in enumerate(x.shape))
    assert steps["dense"].title == f"{x.size} numbers"
    assert steps["step 3"].title == f"{tt.n_parameters} numbers"
    assert len(tnlib.draw(steps).diagram.nodes) == 1 + 2 + 3 + 4 + len(steps)


def test_other_trains_are_refused() -> None:
    tt = tnlib.tt_svd(np.random.default_rng(0).standard_normal((3, 4, 5))).value
    short = tnlib.TensorTrain([np.ones((1, 2, 1))])
    for value, words in ((tnlib.canonicalize(tt, 0), "core 0 that is no isometry"), (short, "got 1")):
        with pytest.raises(tnlib.ArgumentError, match=words):
            sweep_steps(value)
    with pytest.raises(tnlib.ArgumentTypeError, match="sweep_steps: tt must be a TensorTrain, got a ndarray"):
        sweep_steps(np.ones((2, 3)))
