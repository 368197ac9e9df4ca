"""Contraction to dense arrays: any network, any range of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
import torch
from hypothesis import given
from hypothesis import strategies as st
from quimb_networks import build, by_einsum, networks

import tnlib
from tnlib.interop import quimb


@given(case=networks(), dtype=st.sampled_from(oracles.DTYPES), seed=st.integers(0, 99))
def test_any_network_is_its_einsum(case: tuple[list[str], str], dtype: Any, seed: int) -> None:
    terms, legs = case
    tn = build(terms, dtype, seed)
    want = by_einsum(tn, legs)
    moduli = build(terms, np.float64)
    for tensor, given_ in zip(moduli, tn, strict=True):
        tensor.modify(data=np.abs(given_.data))
    unit = 64 * oracles.eps(dtype) * oracles.norm(by_einsum(moduli, legs))  # what cancels is lost
    for path in (None, quimb.contraction_cost(tn, legs=list(legs)).left_to_right.path):
        got = quimb.contract(tn, legs=list(legs), path=path)
        assert got.dtype == dtype
        assert got.shape == want.shape
        assert oracles.norm(oracles.wide(got) - oracles.wide(want)) <= unit


def test_long_chains_do_not_leave_the_range() -> None:
    for size, want in ((1e3, 900.0), (1e-3, -900.0)):
        tt = tnlib.TensorTrain([np.full((1, 2, 1), size)] * 300)
        tn = quimb.to_network(tt)
        ones = [qtn.Tensor([1.0, 0.0], [f"k{k}"]) for k in range(300)]
        tn.exponent = -want
        assert quimb.contract(qtn.TensorNetwork([tn, *ones])) == pytest.approx(1.0, rel=1e-12)
        tn.exponent = 0.0
        if want > 0:
            with oracles.refused(ValueError, "contract", "range of float64", "10**900"):
                quimb.contract(qtn.TensorNetwork([tn, *ones]))
        else:
            assert quimb.contract(qtn.TensorNetwork([tn, *ones])) == 0


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_every_product_is_in_range(dtype: Any) -> None:
    """The first product overflows, the second underflows, the result is ordinary; scaling by powers of two is exact."""
    power = 100 if dtype.itemsize == 4 or dtype == np.complex64 else 1000
    arrays = [oracles.normal((3, 3), dtype, seed) for seed in range(4)]
    scaled = [(a * dtype.type(2.0**e)) for a, e in zip(arrays, (power, power, -power, -power), strict=True)]
    plain, far = (
        qtn.TensorNetwork([qtn.Tensor(a, pair) for a, pair in zip(data, ("ab", "bc", "cd", "de"), strict=True)])
        for data in (arrays, scaled)
    )
    path = quimb.contraction_cost(plain).left_to_right.path
    result = quimb.contract(far, path=path)
    oracles.assert_close(result, arrays[0] @ arrays[1] @ arrays[2] @ arrays[3], dtype)
    np.testing.assert_array_equal(result, quimb.contract(plain, path=path))


def test_zero_inside() -> None:
    pair = qtn.Tensor([1.0, 0.0], ["a"]) & qtn.Tensor([0.0, 1.0], ["a"]) & qtn.Tensor([2.0, 3.0], ["b"])
    np.testing.assert_array_equal(quimb.contract(pair), [0.0, 0.0])


def test_arrays_of_torch_and_integers() -> None:
    a, b = oracles.normal((2, 3)), np.arange(12).reshape(3, 4)
    mixed = qtn.Tensor(torch.tensor(a, requires_grad=True), ["i", "j"]) & qtn.Tensor(b, ["j", "k"])
    oracles.assert_close(quimb.contract(mixed, legs=("i", "k")), a @ b)
    halves = qtn.Tensor(torch.tensor(a, dtype=torch.bfloat16), ["i", "j"], ["A"]) & qtn.Tensor(torch.ones(3), ["j"])
    want = torch.tensor(a, dtype=torch.bfloat16).float().numpy()
    got = quimb.derivative(halves, "A", legs=["i"])
    oracles.assert_close(np.tensordot(got, want, 2), want.sum(1), np.float32)
    triple = halves & qtn.Tensor(torch.ones(3, dtype=torch.float64), ["j"])
    oracles.assert_close(quimb.contract(quimb.spell_out(triple)), want.sum(1), np.float32)


def test_bad_input() -> None:
    tn = build(["ab", "bc", "ca"])
    with oracles.refused(ValueError, "contract", "legs", "'z'", "a, b, c"):
        quimb.contract(tn, legs=["z"])
    with oracles.refused(TypeError, "contract", "legs"):
        quimb.contract(tn, legs="ab")
    with oracles.refused(ValueError, "contract", "legs", "once"):
        quimb.contract(tn, legs=["a", "a"])
    with oracles.refused(TypeError, "contract", "tn", "list"):
        quimb.contract([np.eye(2)])
    with oracles.refused(TypeError, "contract", "path"):
        quimb.contract(tn, path=3)
    with oracles.refused(ValueError, "contract", "path", "leave one"):
        quimb.contract(tn, path=[(0, 1)])
    tn["T1"].modify(data=np.full((3, 2), np.inf))
    with oracles.refused(ValueError, "contract", "finite", "T1"):
        quimb.contract(tn)


def test_what_no_memory_holds_is_not_begun() -> None:
    chain = tnlib.TensorTrain([np.ones((1, 4, 1))] * 60)
    with oracles.refused(ValueError, "contract: every product", "2**120", "contraction_cost"):
        quimb.contract(quimb.to_network(chain))
    peps = quimb.Network(qtn.PEPS.rand(8, 8, 2, phys_dim=2, seed=1))
    with oracles.refused(ValueError, "contract: every product", "memory"):
        peps.full()
