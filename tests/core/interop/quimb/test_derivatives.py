"""Derivatives against finite differences and autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
import torch
from quimb_networks import SIZES, build, by_einsum

import tnlib
from tnlib.interop import quimb

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


def test_bad_input() -> None:
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
