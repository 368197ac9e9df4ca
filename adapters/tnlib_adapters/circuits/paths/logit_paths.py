r"""Contributions of heads, feed-forward layers, tokens and biases to a logit, over all paths of a frozen model.

Every block of a frozen model is x -> N (x + sum_l (K_l x + c_l)) + b: N and b are the norm behind it, c_l the biases
and the remainder of a layer. A linear readout of the final stream is pulled back block by block, along all paths (r)
and along the residual stream alone (s), where only norms act:

    r -> N^T r + sum_l K_l^T N^T r          s -> N^T s

With y_l = K_l x the output of a head on the actual stream, <s, y_l> is the sum over paths whose last layer it is, and
<r, y_l> the sum over all paths through it. The readout that reaches the embedding is the sum over all paths of a token.
The cost is that of one backward pass; the number of paths is exponential in the number of layers. Along the residual
stream the readout stays at its position, so that direct contributions take one row of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import is_list
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.circuits.arguments import as_directions
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, FrozenNorm, pull_back
from tnlib_adapters.frozen.frozen_model import FrozenModel
from tnlib_adapters.reference.layers import normed
from tnlib_adapters.result_table import Columns, Table, descending


@dataclass(frozen=True, eq=False, repr=False)
class LogitContributions(Table):
    """Contributions of the parts of a model to a logit, or another readout of its output at one position.

    Contributions are computed when they are read: direct ones from one position of every layer, those of all paths by a
    backward pass.

    Parameters
    ----------
    model
        The model on a text.
    vector
        (d_model,), the readout of the hidden state.
    position
        Output position.
    bias
        What is added to the readout.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = logit_contributions(tnlib_adapters.freeze(model, [5, 6, 7, 8, 5, 6]), 7)
    >>> head = found.direct.argmax()
    >>> found.names[head], f"{found.direct[head]:.2f}, total {found.total:.2f}"
    ('1.0', '2.05, total 1.68')
    >>> int(found.by_position.argmax())                                   # token 7 itself
    2
    """

    model: FrozenModel
    vector: Array
    position: int
    bias: float

    _SHOWN = 8

    @property
    def names(self) -> tuple[str, ...]:
        """Components: "0.3" for head 3 of layer 0, "mlp 0" for a feed-forward layer."""
        return tuple(self._direct.components)

    @cached_property
    def direct(self) -> Array:
        """(components,): contribution of what a component writes, along the residual stream only.

        Together with `direct_sources` they sum to `total`.
        """
        return np.array(list(self._direct.components.values()))

    @cached_property
    def through(self) -> Array:
        """(components,): sum over all paths through a component. A path counts for each of its components."""
        return np.array(list(self._on_all_paths.components.values()))

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of paths other than the embedding.

        "0.bias" for the biases of attention 0 and its norms, "mlp 0 bias", "mlp 0 remainder" for what a feed-forward
        layer adds beside its linear map, "norm after ..." and "final bias".
        """
        return tuple(self._direct.sources)

    @cached_property
    def by_source(self) -> Array:
        """(sources,): sum over all paths from a source. Together with `by_position` they sum to `total`."""
        return np.array(list(self._on_all_paths.sources.values()))

    @cached_property
    def by_position(self) -> Array:
        """(n,): sum over all paths from the embedding at a position."""
        return np.asarray((self._on_all_paths.readout * self.model.embedding).sum(axis=1))  # n [d]

    @cached_property
    def direct_sources(self) -> Array:
        """(1 + sources,): the embedding, then the sources, along the residual stream only."""
        from_embedding = float(self._direct.readout[0] @ self.model.embedding[self.position])
        return np.array([from_embedding, *self._direct.sources.values()])

    @cached_property
    def total(self) -> float:
        """The logit of the model, before a soft cap."""
        hidden = normed(self.model.norm, self._at_position.stream)
        return float(hidden[0] @ self.vector) + self.bias

    @property
    def readout(self) -> Array:
        """(n, d): the vector at the position, zeros elsewhere."""
        readout = np.zeros_like(self.model.embedding, dtype=self.vector.dtype)
        readout[self.position] = self.vector
        return readout

    @cached_property
    def _direct(self) -> _Contributions:
        return _pulled_back(self._at_position, self.vector[None], self.bias, all_paths=False)

    @cached_property
    def _on_all_paths(self) -> _Contributions:
        return _pulled_back(self.model, self.readout, self.bias, all_paths=True)

    @cached_property
    def _at_position(self) -> FrozenModel:
        return self.model.at(self.position)

    @property
    def _title(self) -> str:
        return f"LogitContributions, {self.total:.3f}"

    def _columns(self, rows: Any) -> Columns:
        names = np.array(self.names, dtype=object)
        return {"component": names[rows], "direct": self.direct[rows], "through": self.through[rows]}

    def _printed(self) -> Array:
        return descending(np.abs(self.direct), self._SHOWN)

    def _notes(self) -> list[str]:
        remainder = sum(v for name, v in zip(self.sources, self.by_source, strict=True) if name.endswith("remainder"))
        biases = self.by_source.sum() - remainder
        return [f"embedding {self.by_position.sum():.3f}, biases {biases:.3f}, remainders {remainder:.3f}"]

    def _picture(self) -> str:
        return heat_image(self.by_position[None], "contributions of the positions, first to last", width=320)


def logit_contributions(
    model: FrozenModel,
    token: int | tuple[int, int] | None = None,
    *,
    direction: ArrayLike | None = None,
    position: int = -1,
) -> LogitContributions:
    """Return the contributions of all heads, feed-forward layers, positions and biases to a logit.

    Parameters
    ----------
    model
        A model on one sequence, returned by `freeze(model, tokens)`.
    token
        Number of the token whose logit is read. Two numbers: the logit of the first less that of the second.
    direction
        (d_model,), in place of a token: any readout of the hidden state, which the final norm has normalised. No bias
        is added.
    position
        Output position.

    Raises
    ------
    ArgumentError
        If the model has no unembedding for a token, or the token, direction or position does not fit it.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = logit_contributions(tnlib_adapters.freeze(llama, [5, 6, 7, 8]), 9)
    >>> f"{found.total:.3f} = {run(llama, [5, 6, 7, 8]).logits[0, -1, 9]:.3f}"
    '3.252 = 3.252'
    >>> f"{found.by_position.sum() + found.by_source.sum():.3f}"
    '3.252'
    """
    if not isinstance(model, FrozenModel):
        raise ArgumentTypeError(
            f"logit_contributions: model must be a FrozenModel, got {type(model).__name__}; pass freeze(model, tokens)."
        )
    at = as_index("logit_contributions", "position", position, len(model.embedding))
    vector, bias = _direction(model, token, direction)
    return LogitContributions(model, vector, at, bias)


class _Contributions(NamedTuple):
    """Contributions of components and sources by name, first to last, and the readout of the embedding."""

    components: dict[str, float]
    sources: dict[str, float]
    readout: Array  # positions d


def _pulled_back(model: FrozenModel, readout: Array, bias: float, *, all_paths: bool) -> _Contributions:
    """Return contributions to a readout (positions, d_model) of the normed stream.

    On all paths, which takes a model on all positions; else along the residual stream only.
    """
    components: list[tuple[str, float]] = []
    sources: list[tuple[str, float]] = [("final bias", bias)]
    readout = _through_norm(model.final_norm, "norm final", readout, sources)
    for block in reversed(model.blocks):
        readout = pulled = _through_norm(block.after, f"norm after {block.names[-1]}", readout, sources)
        for branch, name in reversed(list(zip(block.branches, block.names, strict=True))):
            if isinstance(branch, FrozenHeads):
                values = branch.value_readouts(readout)
                by_head, of_biases = branch.contributions(readout, values)
                components += [(f"{name}.{h}", float(value)) for h, value in reversed(list(enumerate(by_head)))]
                sources.append((f"{name}.bias", float(of_biases)))
                added = branch.adjoint(values) if all_paths else None
            else:
                added, of_biases = branch.pull_back(readout)
                remainder = 0.0 if branch.remainder is None else float((readout * branch.remainder).sum())
                components.append((name, float((readout * branch.output).sum() - of_biases - remainder)))
                sources.append((f"{name} bias", float(of_biases)))
                sources += [] if branch.remainder is None else [(f"{name} remainder", remainder)]
            if all_paths:
                pulled = pulled + added
        readout = pulled
    return _Contributions(dict(components[::-1]), dict(sources[::-1]), readout)


def _through_norm(norm: FrozenNorm | None, name: str, readout: Array, sources: list[tuple[str, float]]) -> Array:
    """Return the readout of the stream before a norm; append the contribution of its bias."""
    pulled, of_bias = pull_back(norm, readout)
    if norm is not None and norm.bias is not None:
        sources.append((name, float(of_bias)))
    return pulled


def _direction(model: FrozenModel, token: Any, direction: Any) -> tuple[Array, float]:
    """Return the readout (d_model,) of the final hidden state, and the bias of a logit."""
    if (token is None) == (direction is None):
        count = "neither" if token is None else "both"
        raise ArgumentTypeError(
            f"logit_contributions: token or direction must be given, got {count}; pass the number of a token."
        )
    if direction is not None:
        vector = as_directions("logit_contributions", direction, model.embedding.shape[1])
        if vector.ndim != 1:
            raise ArgumentError(
                f"logit_contributions: direction must have one axis, got {vector.shape}; pass one at a time."
            )
        return vector, 0.0
    if model.unembed is None:
        raise ArgumentError(
            "logit_contributions: model must have an unembedding for a token, got one that ends in hidden states; pass "
            "a direction."
        )
    weight, bias = model.unembed.affine.weight, model.unembed.affine.bias
    pair = token if is_list(token) and len(token) == 2 else (token,)
    first, *others = (as_index("logit_contributions", "token", t, weight.shape[1]) for t in pair)
    shift = 0.0 if bias is None else float(bias[first] - bias[others].sum())
    return np.asarray(weight[:, first] - weight[:, others].sum(axis=1)), shift
