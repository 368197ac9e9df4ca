"""Contraction to dense arrays in any range of numbers, its order and cost, and derivatives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
import torch
from hypothesis import given
from hypothesis import strategies as st
from quimb_networks import SIZES, build, by_einsum, networks

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


@pytest.mark.slow
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


@oracles.each_dtype
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


def test_bad_input_of_orders() -> None:
    tn = build(["ab", "bc", "ca"])
    with oracles.refused(ValueError, "contraction_cost", "path", "there"):
        quimb.contraction_cost(tn, path=[(0, 1), (0, 5)])
    with oracles.refused(TypeError, "contraction_cost", "path", "pairs"):
        quimb.contraction_cost(tn, path="ab")


NETWORKS = {
    "a ring": (["ab", "bc", "ca"], ""),
    "a chain with open ends": (["ab", "bcd", "de"], "ace"),
    "all indices of the tensor open": (["ab", "bd"], "dba"),
    "a copied index": (["ab", "b", "bc", "b"], "ac"),
    "a copied open index": (["ab", "ba", "a"], "a"),
    "a sum over an index of its own": (["ah", "ac"], "c"),
    "a tensor alone": (["abc"], "cb"),
    "a number": (["", "ab"], "b"),
    "loops and parts apart": (["abe", "bcf", "cad", "de", "f", "gh"], "h"),
}


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("case", NETWORKS)
def test_derivative_against_finite_differences(case: str, dtype: Any) -> None:
    """The contraction is linear in a tensor: the difference is exact up to roundoff, whatever the step."""
    terms, legs = NETWORKS[case]
    tn = build(terms, dtype)
    for k, tensor in enumerate(list(tn)):
        before = [t.data.copy() for t in tn]
        got = quimb.derivative(tn, f"T{k}", legs=list(legs))
        assert got.shape == (*(SIZES[i] for i in legs), *tensor.shape)
        assert all((t.data == a).all() for t, a in zip(tn, before, strict=True))
        want = np.zeros(got.shape, dtype)
        for place in np.ndindex(tensor.shape):
            moved = tn.copy()
            data = np.array(tensor.data)
            data[place] += 1.0
            next(t for t in moved if f"T{k}" in t.tags).modify(data=data)
            want[(..., *place)] = by_einsum(moved, legs) - by_einsum(tn, legs)
        oracles.assert_close(got, want, dtype, factor=1000)
        back = np.tensordot(got, tensor.data, tensor.ndim)
        oracles.assert_close(back, by_einsum(tn, legs), dtype, factor=1000)
        hole = quimb.poke_hole(tn, f"T{k}", legs=list(legs))
        named = [f"{i}*" if i in legs else i for i in tensor.inds]
        if hole.num_tensors:
            oracles.assert_close(quimb.contract(hole, legs=[*legs, *named]), got, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradient_of_a_real_loss_against_autograd(dtype: Any) -> None:
    """torch's gradient of L = Re(sum(c * contraction)) is the conjugate of the derivative."""
    terms, legs = ["abe", "bcf", "cad", "de", "f"], "f"
    tn = build([*terms[:4], "cb"], np.complex128 if dtype.is_complex else np.float64, seed=3)
    variables = [torch.tensor(t.data, dtype=dtype, requires_grad=True) for t in tn]
    weights = oracles.normal((SIZES["f"],), variables[0].detach().numpy().dtype, seed=50)
    spelled = ",".join("".join(t.inds) for t in tn)
    out = torch.einsum(f"{spelled}->{legs}", *variables)
    (torch.tensor(weights) * out).sum().real.backward()
    for k, variable in enumerate(variables):
        got = np.tensordot(weights, quimb.derivative(tn, f"T{k}", legs=["f"]), 1)
        oracles.assert_close(got.conj(), variable.grad.numpy(), factor=1000)


def test_the_gradient_of_a_norm_has_a_hole_at_the_conjugate() -> None:
    """d <psi|psi> / d conj(T) is T in the gauge whose centre is T."""
    cores = oracles.random_cores((2, 3, 2, 3), (1, 2, 4, 2, 1), np.complex128)
    tt = tnlib.canonicalize(tnlib.TensorTrain(cores), 2)
    ket = quimb.to_network(tt)
    bra = ket.H.reindex({i: f"{i}'" for i in ket.inner_inds()}).retag({f"I{k}": f"J{k}" for k in range(4)})
    got = quimb.derivative(ket & bra, "J2")
    oracles.assert_close(got, tt.cores[2], factor=1000)
    oracles.assert_close(quimb.derivative(ket & bra, "I2"), tt.cores[2].conj(), factor=1000)


def test_the_environment_of_a_peps_tensor_gives_the_norm_back() -> None:
    peps = qtn.PEPS.rand(3, 3, bond_dim=2, seed=5)
    bra = peps.H.reindex({i: f"{i}*" for i in peps.inner_inds()}).retag({t: f"{t}*" for t in peps.tags})
    centre = peps["I1,1"]
    gradient = quimb.derivative(bra & peps, "I1,1")
    want = (peps.H & peps).contract(optimize="greedy")
    assert np.tensordot(gradient, centre.data, centre.ndim) == pytest.approx(want, rel=1e-12)


def test_bad_input_of_derivatives() -> None:
    tn = build(["ab", "bc", "ca"])
    with oracles.refused(ValueError, "derivative", "T7", "of 0", "T0, T1, T2"):
        quimb.derivative(tn, "T7")
    tn.add_tag("all")
    with oracles.refused(ValueError, "poke_hole", "all", "of 3"):
        quimb.poke_hole(tn, "all")
    with oracles.refused(TypeError, "derivative", "tensor"):
        quimb.derivative(tn, 0)
    with oracles.refused(ValueError, "derivative", "legs", "'z'"):
        quimb.derivative(tn, ["all", "T0"], legs=["z"])
    twice = qtn.TensorNetwork([qtn.Tensor(np.eye(2), ["a", "a"], ["T"])])
    with oracles.refused(ValueError, "derivative", "one index twice"):
        quimb.derivative(twice, "T")
