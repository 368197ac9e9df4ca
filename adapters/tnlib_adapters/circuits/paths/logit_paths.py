r"""Contributions of heads, feed-forward layers, tokens and biases to a logit, over all paths of a frozen model.

Every block of a frozen model is x -> N (x + sum_l (K_l x + c_l)) + b: N and b are the norm behind it, c_l the biases
and the remainder of a layer. A linear readout of the final stream is pulled back block by block, along all paths (r)
and along the residual stream alone (s), where only norms act:

    r -> N^T r + sum_l K_l^T N^T r          s -> N^T s

With y_l = K_l x the output of a head on the actual stream, <s, y_l> is the sum over paths whose last layer it is, and
<r, y_l> the sum over all paths through it. The readout that reaches the embedding is the sum over all paths of a token.
The cost is that of one backward pass; the number of paths is exponential in the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import facts, heat_image, table
from tnlib._typing import Array
from tnlib_adapters.attention.frozen.layer import FrozenAttention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.circuits.arguments import as_directions
from tnlib_adapters.circuits.data_frames import data_frame
from tnlib_adapters.circuits.paths.contributions import Layer
from tnlib_adapters.transforms.frozen_model import FrozenBlock, FrozenModel
from tnlib_adapters.transforms.frozen_norm import FrozenNorm

_SHOWN = 8  # rows of a printed table


@dataclass(frozen=True, eq=False, repr=False)
class LogitContributions:
    """Contributions of the parts of a model to a logit, or another readout of its output at one position.

    Parameters
    ----------
    total
        The logit of the model, before a soft cap.
    names
        Components: "0.3" for head 3 of layer 0, "mlp 0" for a feed-forward layer.
    direct
        (components,): contribution of what a component writes, along the residual stream only. Together with
        `direct_sources` they sum to `total`.
    through
        (components,): sum over all paths through a component. A path counts for each of its components.
    sources
        Where paths start, other than the embedding: "0.bias" for the biases of attention 0 and its norms, "mlp 0 bias",
        "mlp 0 remainder" for what a feed-forward layer adds beside its linear map, "norm after ..." and "final bias".
    by_source
        (sources,): sum over all paths from a source. Together with `by_position` they sum to `total`.
    by_position
        (n,): sum over all paths from the embedding at a position.
    direct_sources
        (1 + sources,): the embedding, then the sources, along the residual stream only.
    """

    total: float
    names: tuple[str, ...]
    direct: Array
    through: Array
    sources: tuple[str, ...]
    by_source: Array
    by_position: Array
    direct_sources: Array

    def __repr__(self) -> str:
        largest = np.argsort(-np.abs(self.direct), kind="stable")[:_SHOWN]
        width = max((len(self.names[k]) for k in largest), default=4) + 2
        rows = [f"  {self.names[k]:{width}}{self.direct[k]:9.3f}{self.through[k]:14.3f}" for k in largest]
        head = f"  {'':{width}}{'direct':>9}{'on all paths':>14}"
        remainder = sum(v for name, v in zip(self.sources, self.by_source, strict=True) if name.endswith("remainder"))
        ends = f"  embedding {self.by_position.sum():.3f}, biases {self.by_source.sum() - remainder:.3f}"
        if any(name.endswith("remainder") for name in self.sources):
            ends += f", remainders {remainder:.3f}"
        return "\n".join([f"LogitContributions, {self.total:.3f}", head, *rows, ends])

    def _repr_html_(self) -> str:
        largest = np.argsort(-np.abs(self.direct), kind="stable")[:_SHOWN]
        rows = [[self.names[k], f"{self.direct[k]:.3f}", f"{self.through[k]:.3f}"] for k in largest]
        sums = {
            "embedding": f"{self.by_position.sum():.3f}",
            "biases and remainders": f"{self.by_source.sum():.3f}",
        }
        positions = heat_image(self.by_position[None], "contributions of the positions, first to last", width=320)
        parts = table(["component", "direct", "on all paths"], rows) + positions
        return facts(f"LogitContributions, {self.total:.3f}", sums, parts)

    def to_frame(self) -> Any:
        """Return a pandas.DataFrame of the components: name, direct contribution, contribution on all paths.

        Raises
        ------
        ModuleNotFoundError
            If pandas is not installed.
        """
        columns = {"component": self.names, "direct": self.direct, "through": self.through}
        return data_frame("LogitContributions.to_frame", columns)


def logit_contributions(
    model: FrozenModel, token: int | None = None, *, direction: ArrayLike | None = None, position: int = -1
) -> LogitContributions:
    """Return the contributions of all heads, feed-forward layers, positions and biases to a logit.

    Parameters
    ----------
    model
        A model on one sequence, returned by `freeze(model, tokens)`.
    token
        Number of the token whose logit is read.
    direction
        (d_model,), in place of a token: any readout of the hidden state, which the final norm has normalised, such as
        the difference of two columns of the unembedding. No bias is added.
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
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = logit_contributions(tnlib_adapters.freeze(llama, [5, 6, 7, 8]), 9)
    >>> logit = run(llama, [5, 6, 7, 8]).logits[0, -1, 9]
    >>> bool(np.isclose(found.total, logit))
    True
    >>> bool(np.isclose(found.by_position.sum() + found.by_source.sum(), logit))
    True
    """
    if not isinstance(model, FrozenModel):
        raise ArgumentTypeError(
            f"logit_contributions: model must be a FrozenModel, got {type(model).__name__}; pass freeze(model, tokens)."
        )
    at = as_index("logit_contributions", "position", position, len(model.embedding))
    vector, bias = _direction(model, token, direction)
    hidden = model.stream if model.final_norm is None else model.final_norm.apply(model.stream)
    readout = _Readout.at(vector, at, len(model.embedding))
    components: list[_Row] = []
    sources: list[_Row] = [("final bias", bias, bias)]
    if model.final_norm is not None:
        sources += _bias_rows("norm final", readout, model.final_norm.bias)
        readout = readout.through_norm(model.final_norm)
    for block in reversed(model.blocks):
        readout = _pull_back(readout, block, components, sources)
    names, direct, through = zip(*components[::-1], strict=True) if components else ((), (), ())
    source_names, direct_sources, by_source = zip(*sources[::-1], strict=True)
    from_embedding = float((readout.direct * model.embedding).sum())
    return LogitContributions(
        total=float(hidden[at] @ vector) + bias,
        names=names,
        direct=np.array(direct),
        through=np.array(through),
        sources=source_names,
        by_source=np.array(by_source),
        by_position=(readout.on_all_paths * model.embedding).sum(axis=1),  # n [d]
        direct_sources=np.array([from_embedding, *direct_sources]),
    )


_Row = tuple[str, float, float]  # name, along the residual stream only, on all paths


@dataclass(frozen=True, eq=False)
class _Readout:
    """Linear functionals of a stream, (n, d_model) each: along the residual stream only, and on all paths."""

    direct: Array
    on_all_paths: Array

    @classmethod
    def at(cls, vector: Array, position: int, n: int) -> _Readout:
        """Return the readout of one position."""
        every = np.zeros((n, len(vector)), vector.dtype)
        every[position] = vector
        return cls(every, every)

    def through_norm(self, norm: FrozenNorm) -> _Readout:
        """Return the readout of the stream before a norm."""
        return _Readout(norm.adjoint(self.direct), norm.adjoint(self.on_all_paths))

    def row(self, name: str, written: Array) -> _Row:
        """Return the contributions of an addition (n, d_model) or (d_model,) to the stream."""
        return name, float((self.direct * written).sum()), float((self.on_all_paths * written).sum())


def _pull_back(readout: _Readout, block: FrozenBlock, components: list[_Row], sources: list[_Row]) -> _Readout:
    """Return the readout of the stream before a block; append contributions of its layers and biases, last first."""
    if block.after is not None:
        sources += _bias_rows(f"norm after {block.names[-1]}", readout, block.after.bias)
        readout = readout.through_norm(block.after)
    pulled = readout.on_all_paths
    for layer, name, output in reversed(list(zip(block.layers, block.names, block.outputs, strict=True))):
        if isinstance(layer, FrozenAttention):
            sources.append(readout.row(f"{name}.bias", layer.constant))
            added = _pull_back_heads(readout, Layer.of(layer.terms, layer.constant), name, block.stream, components)
        else:
            written = output - layer.constant
            sources.append(readout.row(f"{name} bias", layer.constant))
            if layer.remainder is not None:
                sources.append(readout.row(f"{name} remainder", layer.remainder))
                written = written - layer.remainder
            components.append(readout.row(name, written))
            added = layer.adjoint(readout.on_all_paths)
        pulled = pulled + added
    return _Readout(readout.direct, pulled)


def _pull_back_heads(readout: _Readout, heads: Layer, name: str, stream: Array, components: list[_Row]) -> Array:
    """Return the readout on all paths that end in the heads of a layer; append the contributions of the heads."""
    arrived = heads.read(stream)  # per head: n r
    direct, every = heads.write_transposed(readout.direct), heads.write_transposed(readout.on_all_paths)
    rows = [
        (f"{name}.{h}", float((a * q).sum()), float((a * r).sum()))
        for h, (a, q, r) in enumerate(zip(arrived, direct, every, strict=True))
    ]
    components += rows[::-1]
    return heads.read_transposed(every)


def _bias_rows(name: str, readout: _Readout, bias: Array | None) -> list[_Row]:
    return [] if bias is None else [readout.row(name, bias)]


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
    index = as_index("logit_contributions", "token", token, weight.shape[1])
    return np.ascontiguousarray(weight[:, index]), 0.0 if bias is None else float(bias[index])
