r"""Perfect sampling: independent samples of the indices of a train, with probability abs(entry)^2 / norm^2.

The centre moves to core 0. Then all cores on the right are isometric, and the probability of index i at leg k, given
the indices on its left, is that of one row vector: with w the product of the chosen slices,

    p(i | left)  =  norm(w G[:, i, :])^2 / norm(w)^2.

The samples are independent, unlike those of a Markov chain, and each costs one pass over the cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, as_rng
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import as_train
from tnlib.linalg.scaling import normalize_rows
from tnlib.linalg.threads import single_threaded_blas

_BATCH = 1 << 20  # numbers in the candidates of one batch of samples


@single_threaded_blas
def sample(tt: TensorTrain, n_samples: int, *, rng: np.random.Generator | int | None = None) -> Array:
    r"""Return independent samples (n_samples, d) of the indices of `tt`, with probabilities :math:`|t_i|^2 / \|t\|^2`.

    Parameters
    ----------
    tt
        A non-zero TensorTrain of shape (n[0], ..., n[d-1]), of any norm and gauge. Its entries are the amplitudes of a
        state, or square roots of probabilities.
    n_samples
        Number of samples. With the same `rng`, the first samples do not depend on this number.
    rng
        A numpy random generator, or a seed; None stands for a fixed seed.

    Returns
    -------
    Array
        One sample per row, (n_samples, d), int64, column k between 0 and n[k] - 1. Their amplitudes are
        `tnlib.entries(tt, samples)`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If all entries of `tt` are zero, or an argument is invalid.

    References
    ----------
    A. J. Ferris, G. Vidal, "Perfect sampling with unitary tensor networks", Phys. Rev. B 85 (2012).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.product_state([[1, 0]] * 50) + tnlib.product_state([[0, 1]] * 50)
    >>> samples = tnlib.sample(ghz, 1000, rng=0)
    >>> samples.shape, np.unique(samples.sum(axis=1)), f"{samples[:, 0].mean():.2f}"
    ((1000, 50), array([ 0, 50]), '0.48')
    """
    as_train("sample", "tt", tt, TensorTrain)
    count, generator = as_count("sample", "n_samples", n_samples), as_rng("sample", rng)
    train = move_center(tt, 0)
    if not train.cores[0].any():
        raise ArgumentError("sample: tt must not be zero, got norm 0; its entries have no probabilities.")
    uniform = generator.random((count, len(tt.cores)))
    step = max(1, _BATCH // max(core.shape[1] * core.shape[2] for core in train.cores))
    return np.concatenate([invert_distribution(train.cores, uniform[i : i + step]) for i in range(0, count, step)])


def invert_distribution(cores: Sequence[Array], uniform: Array, given: Array | None = None) -> Array:
    """Return the indices (N, d) at which the conditional distribution functions pass `uniform` (N, d).

    `cores` are right-isometric but the first. The first legs may be `given`, (N, d) with -1 for those to draw; where
    the train is zero for them, the others are arbitrary.
    """
    chosen = np.empty(uniform.shape, np.int64)
    samples = np.arange(len(uniform))
    rows = np.ones((len(uniform), 1), cores[0].dtype)  # N l
    for k, core in enumerate(cores):
        candidates = (rows @ core.reshape(len(core), -1)).reshape(len(rows), *core.shape[1:])  # N [l] n r
        weights = np.square(np.abs(candidates), dtype=np.float64).sum(axis=2)  # N n
        passed = np.cumsum(weights, axis=1)
        # below the total even after rounding, so that an index of probability zero is never chosen
        thresholds = np.minimum(uniform[:, k] * passed[:, -1], np.nextafter(passed[:, -1], 0.0))
        chosen[:, k] = (passed <= thresholds[:, None]).sum(axis=1)
        if given is not None:
            drawn = np.minimum(chosen[:, k], core.shape[1] - 1)  # zeros pass nothing
            chosen[:, k] = np.where(given[:, k] < 0, drawn, given[:, k])
        rows, _ = normalize_rows(np.ascontiguousarray(candidates[samples, chosen[:, k]]))
    return chosen
