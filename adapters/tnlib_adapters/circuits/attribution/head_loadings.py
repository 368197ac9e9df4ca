r"""Shares of attention heads in the edge from a source in the residual stream to a logit.

With patterns and norm divisors frozen, the edge from a vector x at one position to a readout r at another is the sum
over all paths between them. At every attention layer l each path passes one head from one key position, or none:

    edge = sum_(h, j) <r_l, head h on x_l at key j>  +  <r_l, x_l>

x_l is the source pushed forward to the layer, r_l the readout pulled back to it. One pass forward and one backward give
the loadings, the terms of the sum, of all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_array, check_choice
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.circuits.paths.logit_paths import LogitContributions
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, pull_back
from tnlib_adapters.result_table import Columns, Table, descending

Through = Literal["heads", "all"]


@dataclass(frozen=True, eq=False, repr=False)
class HeadLoadings(Table):
    """Loadings of heads in one edge, returned by `head_loadings`.

    Parameters
    ----------
    source, position
        Positions of the source and of the readout.
    total
        The edge.
    layers
        Loadings (heads, n) of the heads of every attention layer by key position, by its index. With the bypass of the
        layer they sum to the edge.

    References
    ----------
    H. Kamath et al., "Tracing Attention Computation Through Feature Interactions" (2025).

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> frozen = tnlib_adapters.freeze(model, [5, 6, 7, 8, 5, 6])
    >>> found = head_loadings(logit_contributions(frozen, 7), 2)
    >>> heads, bypass = found.layers[1].sum(), found.bypass[1]
    >>> f"{found.total:.2f} = {heads:.2f} by heads of layer 1 + {bypass:.2f}"
    '2.13 = 2.06 by heads of layer 1 + 0.07'
    """

    source: int
    position: int
    total: float
    layers: Mapping[int, Array]

    _SHOWN = 8

    @property
    def bypass(self) -> dict[int, float]:
        """The part of the edge that passes no head of a layer, by its index."""
        return {layer: self.total - float(loadings.sum()) for layer, loadings in self.layers.items()}

    @property
    def _title(self) -> str:
        return f"HeadLoadings of the edge from position {self.source} to position {self.position}: {self.total:.3f}"

    def _loadings(self) -> Array:
        return np.concatenate([loadings.ravel() for loadings in self.layers.values()])

    def _columns(self, rows: Any) -> Columns:
        places = [
            (layer, head, key) for layer, loadings in self.layers.items() for head, key in np.ndindex(loadings.shape)
        ]
        layer, head, key = np.array(places)[rows].T
        return {"layer": layer, "head": head, "key": key, "loading": self._loadings()[rows]}

    def _printed(self) -> Array:
        return descending(np.abs(self._loadings()), self._SHOWN)

    def _picture(self) -> str:
        label = "loadings, heads as rows and keys as columns"
        return heat_image(np.concatenate([*self.layers.values()]), label, width=160)


def head_loadings(
    contributions: LogitContributions,
    source: int,
    *,
    vector: ArrayLike | None = None,
    layer: int = 0,
    through: Through = "heads",
) -> HeadLoadings:
    """Return the share of every head, by key position, in the edge from a source to a logit.

    Parameters
    ----------
    contributions
        What `logit_contributions` returned, of a token or of any direction: the target of the edge.
    source
        Position of the source.
    vector
        (d_model,), the source in the stream before attention layer `layer`, such as a feature times its activation.
        None: the stream of the model there; for layer 0 the embedding of the token.
    layer
        Attention layer, from 0.
    through
        Layers that paths may pass. "heads": attention alone, as in attribution graphs, where feed-forward layers are
        nodes. "all": the linear maps of feed-forward layers too, those of `freeze`; the edge from an embedding is then
        `contributions.by_position`.

    Returns
    -------
    HeadLoadings
        Printed with the largest loadings first.

    Raises
    ------
    ArgumentError
        If there is no such position or layer, or the vector has another shape.

    References
    ----------
    H. Kamath et al., "Tracing Attention Computation Through Feature Interactions" (2025).

    Examples
    --------
    Token 7 follows 6 at its first occurrence; an induction head carries it to the logit after the second 6:

    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> frozen = tnlib_adapters.freeze(model, [5, 6, 7, 8, 5, 6])
    >>> contributions = logit_contributions(frozen, 7)
    >>> found = head_loadings(contributions, 2)
    >>> found.layers[1][:, 2].round(2)                                  # mostly head 1.0
    array([ 2.65,  0.01, -0.05,  0.  ])
    >>> bool(np.isclose(found.total, contributions.by_position[2]))
    True
    """
    function = "head_loadings"
    if not isinstance(contributions, LogitContributions):
        raise ArgumentTypeError(
            f"{function}: contributions must be LogitContributions, got {type(contributions).__name__}; pass "
            "logit_contributions(freeze(model, tokens), token)."
        )
    check_choice(function, "through", through, get_args(Through))
    model = contributions.model
    n_layers = sum(name.isdecimal() for block in model.blocks for name in block.names)
    first = as_index(function, "layer", layer, n_layers)
    at = as_index(function, "source", source, len(model.embedding))
    start = next(k for k, block in enumerate(model.blocks) if str(first) in block.names)
    blocks, stream = model.blocks[start:], np.zeros_like(model.embedding)
    stream[at] = blocks[0].stream[at] if vector is None else _as_vector(function, vector, stream.shape[1])
    streams = []
    for block in blocks:
        streams.append(stream)
        passed = [branch for branch in block.branches if through == "all" or isinstance(branch, FrozenHeads)]
        stream = stream + sum(branch.linear(stream) for branch in passed)
        stream = stream if block.after is None else block.after.linear(stream)
    readout, _ = pull_back(model.final_norm, contributions.readout)
    total, layers = float((readout * stream).sum()), {}
    for block, x in zip(reversed(blocks), reversed(streams), strict=True):
        readout = pulled = pull_back(block.after, readout)[0]
        for branch, name in zip(block.branches, block.names, strict=True):
            if isinstance(branch, FrozenHeads):
                values = branch.value_readouts(readout)  # h n dh
                of_heads = np.stack([branch.head_adjoint(h, v) for h, v in enumerate(values)])  # h n d
                layers[int(name)] = np.asarray((of_heads * x).sum(axis=-1))
                pulled = pulled + of_heads.sum(axis=0)
            elif through == "all":
                pulled = pulled + branch.pull_back(readout)[0]
        readout = pulled
    return HeadLoadings(at, contributions.position, total, dict(sorted(layers.items())))


def _as_vector(function: str, vector: ArrayLike, d: int) -> Array:
    x = as_array(function, "vector", vector)
    if x.shape != (d,) or x.dtype.kind == "c":
        raise ArgumentError(
            f"{function}: vector must be real, ({d},), got {x.dtype} of shape {x.shape}; pass what is written to the "
            "stream at the source."
        )
    return x
