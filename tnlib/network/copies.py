"""Copy tensors: an index that joins many tensors is a delta with a leg to each of them."""

from __future__ import annotations

from typing import Any

from tnlib.network.arguments import as_network, dtype_of, need
from tnlib.network.special import delta


def spell_out(tn: Any) -> Any:
    """Return the same network with a copy tensor on every index that joins three tensors or more.

    Most of what there is for networks knows only bonds between two tensors; a CP, an SVD or a Vidal becomes such a
    network by storing the deltas that stand on its diagonal bonds.

    Parameters
    ----------
    tn
        A TensorNetwork of quimb; it is not changed.

    Returns
    -------
    quimb.tensor.TensorNetwork
        Tensors as before, under new names of these indices, and deltas with the tag DELTA.

    Raises
    ------
    ArgumentTypeError
        If `tn` is no network.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tn = tnlib.network.to_network(tnlib.CP(np.ones(2), [np.ones((3, 2))] * 4))
    >>> tn.num_tensors, tnlib.network.spell_out(tn)["DELTA"].shape
    (5, (2, 2, 2, 2, 2))
    """
    as_network("spell_out", tn)
    qtn = need("spell_out")
    out = tn.copy()
    for index, holders in tn.ind_map.items():
        if len(holders) < 3:
            continue
        ends = [qtn.rand_uuid() for _ in holders]
        for tid, end in zip(sorted(holders), ends, strict=True):
            out.tensor_map[tid].reindex_({index: end})
        dtype = dtype_of(*(tn.tensor_map[tid] for tid in holders))
        out |= qtn.Tensor(delta(tn.ind_size(index), len(ends), dtype=dtype), ends, "DELTA")
    return out
