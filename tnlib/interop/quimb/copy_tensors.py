"""Copy tensors on hyperindices, so that every index joins at most two tensors."""

from __future__ import annotations

import quimb.tensor as qtn

from tnlib._errors import ArgumentError
from tnlib._format import MAX_NDIM, fits_in_memory
from tnlib.interop.quimb.network_arguments import as_network, common_dtype


def spell_out(tn: qtn.TensorNetwork) -> qtn.TensorNetwork:
    """Return the same network with a copy tensor in place of every index that joins three or more tensors.

    Most algorithms for networks accept only bonds between two tensors. In the networks of a CP, an SVD or a Vidal
    diagonal tensors are vectors on such a hyperindex. The copy tensors have the tag DELTA, and these indices new names.
    Unlike quimb's `hyperinds_resolve` it accepts half precision, and raises ArgumentError where a copy tensor does not
    fit into memory.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import spell_out, to_network
    >>> tn = to_network(tnlib.CP(np.ones(2), [np.ones((3, 2))] * 4))
    >>> tn.num_tensors, spell_out(tn)["DELTA"].shape
    (5, (2, 2, 2, 2, 2))
    """
    out = as_network("spell_out", tn).copy()
    for index, ids in tn.ind_map.items():
        if len(ids) < 3:
            continue
        size, dtype = tn.ind_size(index), common_dtype(tn.tensor_map[tid] for tid in ids)
        if len(ids) > MAX_NDIM or not fits_in_memory(size ** len(ids), dtype):
            raise ArgumentError(
                f"spell_out: every copy tensor must have at most {MAX_NDIM} legs and fit into memory, got index "
                f"{index} of size {size} on {len(ids)} tensors; use tn.hyperinds_resolve('tree') instead."
            )
        ends = [qtn.rand_uuid() for _ in ids]
        for tid, end in zip(sorted(ids), ends, strict=True):
            out.tensor_map[tid].reindex_({index: end})
        out |= qtn.COPY_tensor(size, ends, "DELTA", dtype=dtype.name)
    return out
