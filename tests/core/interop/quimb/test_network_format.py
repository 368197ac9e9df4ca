"""Networks as formats, with copy tensors and isometric tensors; PEPS and MERA of quimb."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
import torch
from quimb_networks import dense, every_format

import tnlib
from tnlib.interop import quimb
from tnlib.interop.quimb.network_builder import leg_names


def test_norms_of_networks_in_any_range() -> None:
    tn = quimb.to_network(tnlib.LowRank(np.ones((2, 1)), np.ones((1, 8))))
    tn.exponent = 300.0
    assert quimb.Network(tn).norm() == pytest.approx(4e300, rel=1e-12)
    tn.exponent = -320.0
    assert quimb.Network(tn).norm() == pytest.approx(4e-320, rel=1e-3)  # below the normal numbers
    tn.exponent = 400.0
    with oracles.refused(ValueError, "Network.norm: the norm", "exponent"):
        quimb.Network(tn).norm()


def rows_of_norm(peps: Any) -> list[Any]:
    """<peps|peps> with one tensor per site, row by row: a train, TT-matrices, a train."""
    two = peps.H.reindex({i: f"{i}*" for i in peps.inner_inds()}) & peps
    for i in range(peps.Lx):
        for j in range(peps.Ly):
            two ^= peps.site_tag(i, j)
    two.fuse_multibonds_()
    return [two.select(peps.x_tag(i)) for i in range(peps.Lx)]


def bonds_between(one: Any, other: Any, columns: int) -> list[str]:
    """The indices from row to row, column by column."""
    pairs = [(one[f"Y{j}"], other[f"Y{j}"]) for j in range(columns)]
    return [next(i for i in a.inds if i in b.inds) for a, b in pairs]


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_boundary_contraction_of_a_peps_by_apply(dtype: str) -> None:
    peps = qtn.PEPS.rand(4, 4, bond_dim=2, seed=3, dtype=dtype)
    rows = rows_of_norm(peps)
    down = [bonds_between(a, b, 4) for a, b in itertools.pairwise(rows)]
    boundary = quimb.from_network(rows[0], tnlib.TensorTrain, names=down[0])
    errors = []
    for k in (1, 2):
        row = quimb.from_network(rows[k], tnlib.TTMatrix, names=[*down[k], *down[k - 1]])
        assert row.ranks == (1, 4, 4, 4, 1)
        fit = tnlib.apply(row, boundary, rtol=1e-8)
        boundary = fit.value
        errors.append(fit.error)
    last = quimb.from_network(rows[3], tnlib.TensorTrain, names=down[2])
    got = tnlib.inner(last.conj(), boundary)
    want = (peps.H & peps).contract(optimize="greedy")
    assert max(errors) <= 1e-8
    # each error is relative to what it truncates, which the rest of the network may enlarge
    assert abs(got - want) <= 1e-6 * abs(want)
    assert max(boundary.ranks) < 4**3  # compressed on the way


def test_a_mera_is_a_network_like_any_other() -> None:
    mera = qtn.MERA.rand(8, max_bond=2, seed=1)
    value = quimb.Network(mera, [f"k{k}" for k in range(8)])
    x = value.full()
    assert oracles.norm(x) == pytest.approx(1.0, rel=1e-12)  # isometries all the way up
    assert value.norm() == pytest.approx(1.0, rel=1e-12)
    tt = tnlib.tt_svd(x).value
    expected = [np.linalg.svd(x.reshape(2**k, -1), compute_uv=False) for k in range(1, 8)]
    for k, s in enumerate(expected, 1):
        got = tnlib.schmidt_values(tt, k)
        np.testing.assert_allclose(got, s[: len(got)], atol=1e-12)
    cost = quimb.contraction_cost(mera)
    assert cost.multiplications < cost.left_to_right.multiplications


@oracles.each_dtype
def test_a_network_is_made_of_named_arrays(dtype: Any) -> None:
    value = quimb.tree(oracles.normal((2, 3, 4, 2), dtype), max_rank=2).value
    value.tn.exponent = 3.0
    again = quimb.Network.from_named_arrays(value.named_arrays(), value.attributes())
    assert (again.legs, again.shape, again.ranks, again.dtype) == (value.legs, value.shape, value.ranks, dtype)
    assert [tensor.tags for tensor in again.tn] == [tensor.tags for tensor in value.tn]
    np.testing.assert_array_equal(again.full(), value.full())
    assert again.norm() == value.norm() == pytest.approx(oracles.norm(value.full()), rel=1e3 * oracles.eps(dtype))
    wide = value.astype(np.complex128)
    assert wide.dtype == np.complex128
    oracles.assert_close(wide.full(), value.full(), dtype)


def test_a_network_is_saved_and_loaded(tmp_path: Path) -> None:
    value = quimb.Network(qtn.PEPS.rand(2, 2, 3, seed=0, dtype="complex128"), ["k1,0", "k0,0", "k0,1", "k1,1"])
    tnlib.save(tmp_path / "peps.safetensors", value)
    again = tnlib.load(tmp_path / "peps.safetensors")
    assert again.legs == value.legs
    np.testing.assert_array_equal(again.full(), value.full())


@pytest.mark.parametrize("exponent", [float("nan"), float("inf"), "1", None])
def test_exponents_that_are_no_numbers(exponent: Any) -> None:
    value = quimb.Network(qtn.MPS_rand_state(3, 2, seed=0))
    with oracles.refused(TypeError if isinstance(exponent, str | None) else ValueError, "Network: exponent"):
        quimb.Network.from_named_arrays(value.named_arrays(), value.attributes() | {"exponent": exponent})


def test_bad_input() -> None:
    with oracles.refused(ValueError, "Network", "legs", "k0"):
        quimb.Network(qtn.MPS_ghz_state(3), legs=["k0", "k1"])
    with oracles.refused(TypeError, "Network", "tn"):
        quimb.Network(np.eye(2))


@every_format
def test_copy_tensors_may_be_stored(value: Any) -> None:
    spelled = quimb.spell_out(quimb.to_network(value))
    assert all(len(holders) <= 2 for holders in spelled.ind_map.values())
    assert set(spelled.outer_inds()) == set(leg_names(value))
    oracles.assert_close(quimb.contract(spelled, legs=leg_names(value)), dense(value), value.dtype)


def test_half_precision_counts_as_single() -> None:
    a = torch.tensor(oracles.normal((2, 3)), dtype=torch.bfloat16)
    vector = qtn.Tensor(torch.ones(3, dtype=torch.float64), ["j"])
    tn = vector & vector & qtn.Tensor(a, ["i", "j"])
    spelled = quimb.spell_out(tn)
    assert str(spelled["DELTA"].dtype) == "float64"
    oracles.assert_close(quimb.contract(spelled), a.float().numpy().sum(1), np.float32)


def test_a_copy_tensor_without_memory_is_refused() -> None:
    vector = qtn.Tensor(np.ones(4), ["j"])
    with oracles.refused(ValueError, "spell_out", "index j of size 4 on 70 tensors", "hyperinds_resolve"):
        quimb.spell_out(qtn.TensorNetwork([vector] * 70))
    with oracles.refused(TypeError, "spell_out", "tn", "ndarray"):
        quimb.spell_out(np.ones(3))


@oracles.each_dtype
def test_isometries(dtype: Any) -> None:
    u = oracles.isometry(24, 6, dtype).astype(dtype)
    for legs, a in (((3, 4), u.reshape(2, 3, 4, 2, 3)), ((0, 2), u.reshape(24, 2, 3).transpose(1, 0, 2))):
        assert quimb.is_isometry(a, legs)
        assert quimb.isometry_error(a, legs) <= 64 * oracles.eps(dtype)
        named = qtn.Tensor(a, "abcde"[: a.ndim])
        assert quimb.is_isometry(named, ["abcde"[k] for k in legs])
        others = [k for k in range(a.ndim) if k not in legs]
        assert quimb.isometry_error(a, others) == pytest.approx(math.sqrt(18), rel=1e-5)  # a projector is no identity
        assert not quimb.is_isometry(a, others)
        assert not quimb.is_isometry(a * dtype.type(1.5), legs)
    assert quimb.isometry_error(np.full((3, 2), 1e300), 1) == math.inf


def test_isometries_of_our_formats_and_of_a_mera() -> None:
    tt = tnlib.canonicalize(tnlib.tt_svd(oracles.normal((3, 4, 5, 2))).value, 1)
    tn = quimb.to_network(tt)
    assert quimb.is_isometry(tn["I0"], "bond1")
    assert quimb.is_isometry(tn["I2"], "bond2")
    assert not quimb.is_isometry(tn["I1"], "bond1")
    mera = qtn.MERA.rand(8, max_bond=3, seed=0)
    assert mera.num_tensors == 14
    for tensor in mera:
        tip = [i for i in tensor.inds if i not in tensor.left_inds]
        assert not tip or quimb.is_isometry(tensor, tip)


def test_bad_input_of_isometries() -> None:
    with oracles.refused(ValueError, "is_isometry", "legs", "not all"):
        quimb.is_isometry(np.eye(3), (0, 1))
    tensor = qtn.Tensor(np.eye(3), ["i", "j"])
    with oracles.refused(ValueError, "isometry_error", "legs", "k", "i, j"):
        quimb.isometry_error(tensor, "k")
    with oracles.refused(TypeError, "isometry_error", "legs", "i, j"):
        quimb.isometry_error(tensor, 0)
    with oracles.refused(ValueError, "isometry_error", "finite"):
        quimb.isometry_error(np.full((2, 2), np.nan), 0)
