r"""Neurons of a feed-forward layer that are kept, and the down projection refitted to them.

With A = E[z z^T] of the inputs z of W_down and B = W_down E[p p^T] W_down^T of the gradients p at its output, neuron j
contributes to the error, as if z and p were independent, A_jj B_jj when it is removed, and

    B_jj / (A^-1)_jj

when the rows of the other neurons are refitted by least squares (optimal brain surgeon: Hassibi and Stork, 1993). The
neurons are removed in rounds: after each, A is restricted to the others, and their rows are refitted.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array

_ROUNDS = 8
_RIDGE = 1e-3  # of the mean of the diagonal of A: the text has few tokens for each neuron


def choose_neurons(down: Array, reads: Array, slopes: Array, count: int) -> tuple[Array, Array]:
    """Return the indices of the neurons that are kept, ascending, and their rows of W_down.

    Parameters
    ----------
    down
        (neurons, d_model), acting on rows.
    reads, slopes
        (neurons,) * 2 and (d_model,) * 2, second moments of the inputs, and of the gradients at the output.
    count
        Number of neurons to keep.
    """
    moments = reads.astype(np.float64) + _RIDGE * np.trace(reads) / len(reads) * np.eye(len(reads))
    kept, rows = np.arange(len(down)), down.astype(np.float64)
    for left in np.linspace(len(down), count, _ROUNDS + 1)[1:].round().astype(int):
        inverse = np.linalg.inv(moments[np.ix_(kept, kept)])
        losses = np.einsum("id,de,ie->i", rows, slopes, rows, optimize=True) / np.diag(inverse)
        stays = np.sort(np.argsort(-losses, kind="stable")[:left])
        goes = np.setdiff1d(np.arange(len(kept)), stays)
        if not len(goes):
            continue
        # the least-squares rows of the others, by the Schur complement of the inverse
        rows = rows[stays] - inverse[np.ix_(stays, goes)] @ np.linalg.solve(inverse[np.ix_(goes, goes)], rows[goes])
        kept = kept[stays]
    return kept, rows
