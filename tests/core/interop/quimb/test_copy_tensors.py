"""Copy tensors on hyperindices."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import quimb.tensor as qtn
import torch
from quimb_networks import dense, every_format

from tnlib.interop import quimb
from tnlib.interop.quimb.to_quimb import leg_names


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
