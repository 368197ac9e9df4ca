"""Stacks of weights with named legs, for tt_svd, tucker and cp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tnlib import ArgumentError, ArgumentTypeError, LowRank
from tnlib._typing import Array
from tnlib._validate import as_sizes, check_choice, is_one_of, to_numpy
from tnlib.linalg.orthogonal import r_factor
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_checkpoint, as_layer, check_form

PROJECTIONS = ("Q", "K", "V", "O")


@dataclass(frozen=True, eq=False, repr=False)
class View:
    """An array with named legs; accepted by `tnlib.tucker(view)` and the other decompositions.

    Parameters
    ----------
    name
        Description.
    array
        The entries.
    legs
        Names of the legs.

    Examples
    --------
    >>> import numpy as np
    >>> View("weights", np.ones((6, 4)), ("in", "out")).split("in", (2, 3))
    View(weights: in.0 2 x in.1 3 x out 4, float64)
    """

    name: str
    array: Array
    legs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", to_numpy("View", "array", self.array))
        if not isinstance(self.legs, Sequence) or not all(isinstance(leg, str) for leg in self.legs):
            raise ArgumentTypeError(
                f"View: legs must be names, one for every leg, got {self.legs!r:.80}; pass for example ('in', 'out')."
            )
        if len(self.legs) != self.array.ndim or len(set(self.legs)) != len(self.legs):
            raise ArgumentError(
                f"View: legs must be {self.array.ndim} different names, one for every leg of {self.name}, "
                f"got {self.legs}; name each once."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the legs."""
        return self.array.shape

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        sizes = " x ".join(f"{leg} {n}" for leg, n in zip(self.legs, self.shape, strict=True))
        return f"View({self.name}: {sizes}, {self.array.dtype})"

    def split(self, leg: str, sizes: Sequence[int]) -> View:
        """Return the view with one leg split into finer ones, slowest first, called `leg`.0, `leg`.1, ..."""
        if not is_one_of(leg, self.legs):
            raise ArgumentError(
                f"View.split: leg must be one of {', '.join(self.legs)}, got {leg!r}; "
                f"these are the legs of {self.name}."
            )
        k = self.legs.index(leg)
        finer = as_sizes("View.split", "sizes", sizes, total=self.shape[k])
        names = tuple(f"{leg}.{i}" for i in range(len(finer)))
        array = self.array.reshape(*self.shape[:k], *finer, *self.shape[k + 1 :])
        return replace(self, array=array, legs=(*self.legs[:k], *names, *self.legs[k + 1 :]))


def projections(attention: Attention) -> View:
    """Return `Attention.stacked` as a view: projection x head x d_model x d_head, in the order Q, K, V, O.

    Examples
    --------
    >>> import tnlib_adapters
    >>> checkpoint = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> projections(checkpoint.attention(0))
    View(all projections of a layer: projection 4 x head 4 x d_model 64 x d_head 16, float32)
    """
    return View(
        "all projections of a layer",
        as_layer("projections", attention).stacked(),
        ("projection", "head", "d_model", "d_head"),
    )


@accepts_models
def heads(checkpoint: Checkpoint, projection: Literal["Q", "K", "V", "O"]) -> View:
    """Return one projection of all layers: layer x head x d_model x d_head, W_O transposed to fit.

    Key and value heads are not repeated for the query heads that share them.

    Examples
    --------
    >>> import tnlib_adapters
    >>> heads(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), "V")
    View(W_V of all layers: layer 2 x head 4 x d_model 64 x d_head 16, float32)
    """
    as_checkpoint("heads", checkpoint)
    check_choice("heads", "projection", projection, PROJECTIONS)
    layers = [getattr(checkpoint.attention(k), f"W_{projection}") for k in range(checkpoint.n_layers)]
    stacked = np.stack([w.transpose(0, 2, 1) if projection == "O" else w for w in layers])
    return View(f"W_{projection} of all layers", stacked, ("layer", "head", "d_model", "d_head"))


def cores(attention: Attention, circuit: Literal["qk", "ov"], *, distance: int | None = None) -> View:
    r"""Return the cores of the operators of all heads between isometries: head x rank x rank, biases included.

    :math:`\Omega = [W_Q; b_Q] [W_K; b_K]^T = Q_1 R_1 (Q_2 R_2)^T` with isometric :math:`Q_1` and :math:`Q_2`, and the
    core is :math:`R_1 R_2^T`: it has the singular values of :math:`\Omega` and :math:`d_\mathrm{head}^2` numbers.

    Parameters
    ----------
    attention
        One layer.
    circuit
        "qk" for query-key operators, "ov" for output-value operators.
    distance
        For "qk" with rotary embeddings or ALiBi, as in `Attention.qk`.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> found = cores(layer, "ov")
    >>> found.shape, bool(np.isclose(np.linalg.norm(found.array[2]), layer.ov(2).norm()))
    ((4, 16, 16), True)
    """
    forms = _operators("cores", attention, circuit, distance)
    triangles = ((_positive_triangle(form.left), _positive_triangle(form.right.T)) for form in forms)
    stacked = np.stack([left @ right.T for left, right in triangles])  # r [r] r'
    sides = ("query", "key") if circuit == "qk" else ("value", "output")
    return View(f"{circuit.upper()} cores of a layer", stacked, ("head", *sides))


def operators(attention: Attention, circuit: Literal["qk", "ov"], *, distance: int | None = None) -> View:
    """Return the dense operators of all heads, head x (d_model + 1) x (d_model + 1); for small models.

    Examples
    --------
    >>> import tnlib_adapters
    >>> checkpoint = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> operators(checkpoint.attention(0), "ov")
    View(OV operators of a layer: head 4 x from 65 x to 65, float32)
    """
    forms = _operators("operators", attention, circuit, distance)
    sides = ("query", "key") if circuit == "qk" else ("from", "to")
    return View(f"{circuit.upper()} operators of a layer", np.stack([form.full() for form in forms]), ("head", *sides))


@accepts_models
def embedding(checkpoint: Checkpoint) -> View:
    """Return the token embeddings: token x d_model.

    Examples
    --------
    >>> import tnlib_adapters
    >>> embedding(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    View(token embeddings: token 128 x d_model 64, float32)
    """
    wiring = as_checkpoint("embedding", checkpoint).wiring
    if wiring.reads != "tokens":
        raise ArgumentError(
            f"embedding: checkpoint must read tokens, got a {wiring.model_type}, which reads images; "
            "pass a language model."
        )
    return View("token embeddings", checkpoint.read(wiring.embedding.table.weight), ("token", "d_model"))


@accepts_models
def unembedding(checkpoint: Checkpoint) -> View:
    """Return the directions of the final stream that the logits read: token x d_model; `embedding` where it is tied.

    A factor of the logits is included, and a projection to narrower embeddings; the final norm and a bias are not.

    Examples
    --------
    >>> import tnlib_adapters
    >>> unembedding(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    View(unembedding: token 128 x d_model 64, float32)
    """
    wiring = as_checkpoint("unembedding", checkpoint).wiring.unembedding
    if wiring is None:
        raise ArgumentError(
            f"unembedding: checkpoint must end in logits, got a {checkpoint.wiring.model_type} without; pass a model "
            "that predicts tokens."
        )
    tokens = wiring.linear.on_rows(checkpoint.read(wiring.linear.weight)).T  # token width
    if wiring.narrow is not None:
        tokens = tokens @ wiring.narrow.on_rows(checkpoint.read(wiring.narrow.weight)).T  # token [width] d_model
    return View("unembedding", tokens * tokens.dtype.type(wiring.scale), ("token", "d_model"))


@accepts_models
def mlp(checkpoint: Checkpoint, layer: int) -> tuple[View, ...]:
    """Return the matrices of a feed-forward layer, acting on rows: inputs d_model x d_ff, outputs d_ff x d_model.

    `tnlib.ttm_svd(view, rows, columns)` splits both legs. A fused matrix of gate and values is one matrix of twice the
    width.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> [view.shape for view in mlp(model, 0)]
    [(128, 320), (128, 320), (320, 128)]
    """
    wiring = as_checkpoint("mlp", checkpoint).wiring
    feed_forward = wiring.layers[as_index("mlp", "layer", layer, checkpoint.n_layers)].feed_forward
    if feed_forward is None:
        instead = "experts instead" if wiring.layers[layer].experts else "none"
        raise ArgumentError(
            f"mlp: checkpoint must have feed-forward layers, got a {wiring.model_type}, whose layer {layer} has "
            f"{instead}; its stacks are those of attention."
        )
    return tuple(
        View(
            matrix.name,
            matrix.on_rows(checkpoint.read(matrix.weight)),
            ("d_ff", "d_model") if matrix == feed_forward.down else ("d_model", "d_ff"),
        )
        for matrix in feed_forward.matrices
    )


def _operators(function: str, attention: Attention, circuit: Any, distance: int | None) -> Iterator[LowRank]:
    """Yield the operators one by one, to limit memory."""
    as_layer(function, attention)
    check_choice(function, "circuit", circuit, ("qk", "ov"))
    if circuit == "qk":
        check_form(function, attention, distance)
        return (attention.qk(head, distance) for head in range(attention.n_heads))
    return (attention.ov(head) for head in range(attention.n_heads))


def _positive_triangle(a: Array) -> Array:
    """Return R of A = Q R with nonnegative diagonal; Q is not computed."""
    r = r_factor(a)
    signs = np.where(np.diagonal(r) < 0, -1, 1).astype(r.dtype)
    return signs[:, None] * r
