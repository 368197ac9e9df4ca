"""Contraction orders and their costs."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from quimb_networks import SIZES, build, networks

import tnlib
from tnlib.interop import quimb


@given(case=networks())
def test_the_cost_is_what_the_steps_add_up_to(case: tuple[list[str], str]) -> None:
    terms, legs = case
    tn = build(terms)
    cost = quimb.contraction_cost(tn, legs=list(legs))
    assert cost == quimb.contraction_cost(tn, legs=list(legs))
    assert cost == quimb.contraction_cost(tn, legs=list(legs), path=cost.path)
    assert cost.multiplications <= cost.left_to_right.multiplications
    assert cost.largest <= max(cost.written, math.prod(SIZES[i] for i in legs))
    assert cost.all_at_once == math.prod(SIZES[i] for i in set("".join(terms)))
    for one in (cost, cost.left_to_right):
        left, count = list(terms), 0
        for step in one.path:
            taken = [left.pop(k) for k in sorted(step, reverse=True)]
            count += math.prod(SIZES[i] for i in set("".join(taken))) * (len(taken) - 1)
            left.append("".join(i for i in dict.fromkeys("".join(taken)) if i in legs or i in "".join(left)))
        assert one.multiplications == count


def test_a_good_order_beats_a_bad_one() -> None:
    """<psi|psi> in the order of one chain first costs exponentially much, zigzag linearly."""
    rng = np.random.default_rng(0)
    tt = tnlib.TensorTrain([rng.normal(size=s) for s in [(1, 2, 4), *[(4, 2, 4)] * 20, (4, 2, 1)]])
    ket = quimb.to_network(tt)
    overlap = ket.H & ket
    cost = quimb.contraction_cost(overlap)
    assert cost.multiplications <= 22 * 2 * 2 * 4**3
    assert cost.largest <= 2 * 4**2
    assert cost.left_to_right.largest >= 2**22
    assert cost.left_to_right.multiplications > 1e4 * cost.multiplications
    assert quimb.contract(overlap, path=cost.path) == pytest.approx(tt.norm() ** 2, rel=1e-13)
    assert cost == quimb.contraction_cost(overlap)
    assert "multiplications" in repr(cost)


def test_bad_input() -> None:
    tn = build(["ab", "bc", "ca"])
    with oracles.refused(ValueError, "contraction_cost", "path", "there"):
        quimb.contraction_cost(tn, path=[(0, 1), (0, 5)])
    with oracles.refused(TypeError, "contraction_cost", "path", "pairs"):
        quimb.contraction_cost(tn, path="ab")
