"""Torch modules of factored matrices, by kind: projections of attention, linear layers, tables of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tnlib import FileFormatError
from tnlib_adapters.architectures.wiring import AttentionWiring
from tnlib_adapters.factors.factored_matrix import STACKS, Description, ranks_of, whole_part
from tnlib_adapters.factors.projections import Sizes, join, rows_of_stack
from tnlib_adapters.transformers_plugin.contracted_linear import (
    LOW_RANK,
    ContractedLinear,
    Contraction,
    cp,
    tt_matrix,
    tucker,
    whole,
)
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, Factors, as_dense, no_numbers
from tnlib_adapters.transformers_plugin.indexed_linear import HeadLinear, InterpolativeLinear


def empty_parameters(described: Description, like: Tensor) -> dict[str, nn.Parameter]:
    """Return empty parameters for loading a factored matrix, by part; integers are not trained."""
    integers = {"U8": torch.uint8, "I8": torch.int8}
    parameters = dict[str, nn.Parameter]()
    # floats come first: readers such as sentence-transformers take the dtype of the first parameter for the model's
    for part, (dtype, shape) in sorted(described.tensors.items(), key=lambda tensor: tensor[1][0] in integers):
        values = torch.empty(shape, dtype=integers.get(dtype or "", like.dtype), device=like.device)
        parameters[part] = nn.Parameter(values, requires_grad=dtype not in integers)
    return parameters


def _of_stack(
    network: Callable[..., Contraction], described: Description, factors: Factors, names: str
) -> FactoredLinear:
    """Return the layer of these projections of a stack, whose entries along the first leg are one after the other."""
    rows = rows_of_stack(described.shape[0])
    heads = (1, 0, 3) if names in ("q", "o") else (0, 1, 3)  # query heads are in the order of their key heads
    legs = (heads, (2,)) if names == "o" else ((2,), heads)
    return ContractedLinear(factors, network(*legs), slice(rows[names[0]].start, rows[names[-1]].stop))


def _heads(described: Description, factors: Factors, names: str, sizes: Any) -> FactoredLinear:
    is_first = names == described.of[0]
    return HeadLinear(
        factors.only("left" if is_first else "right"),
        ranks_of(names, described.ranks, sizes),
        sizes.of_head(names),
        sizes.d_model,
        reads_heads=names == "o",
        transposed=not is_first and names != "o",
    )


def _interpolative(described: Description, factors: Factors, names: str, sizes: Sizes | None) -> FactoredLinear:
    n_in, _ = described.shape if sizes is None else sizes.sides(names)
    return InterpolativeLinear(factors, described.rows, n_in)


# Functions that make the layer of a factored matrix, without a bias parameter. The layer computes the projections of
# these names among those of the matrix, or the weight of a module, without a name and sizes.
MAKE: Mapping[str, Callable[[Description, Factors, str, Sizes | None], FactoredLinear]] = {
    "dense": lambda described, factors, *_: ContractedLinear(factors, whole(whole_part(described.of))),
    "low_rank": lambda _, factors, *__: ContractedLinear(factors, LOW_RANK),
    "ttm": lambda _, factors, *__: ContractedLinear(
        factors, tt_matrix(sum(part.startswith("core") for part in factors.shapes))
    ),
    "heads": _heads,
    "interpolative": _interpolative,
    "tucker": lambda described, factors, names, _: _of_stack(tucker, described, factors, names),
    "cp": lambda described, factors, names, _: _of_stack(cp, described, factors, names),
    "stack": lambda described, factors, names, _: _of_stack(partial(whole, "stack"), described, factors, names),
}


class LayerFactors(nn.Module):
    """The factors of one layer, under their names in the file."""

    def __init__(self, described: Sequence[Description], like: Tensor) -> None:
        super().__init__()
        for description in described:
            for part, parameter in empty_parameters(description, like).items():
                self.register_parameter(f"{description.of}_{part}", parameter)

    def extra_repr(self) -> str:
        """Return the shapes."""
        return ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.named_parameters())


class SideBySide(nn.Module):
    """Layers of one input with concatenated outputs, for modules that compute queries, keys and values together.

    `groups` are those of `AttentionWiring`.
    """

    bias: nn.Parameter | None
    layers: Sequence[FactoredLinear]

    def __init__(self, layers: Sequence[FactoredLinear], groups: tuple[int, int] | None) -> None:
        super().__init__()
        self.layers, self.groups = cast(Any, nn.ModuleList(layers)), groups
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs."""
        y: Tensor = join([layer(x) for layer in self.layers], self.groups, torch.cat)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W of shape (in_features, out_features), multiplied out."""
        return join([layer.matrix(dtype) for layer in self.layers], self.groups, torch.cat)

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias, or None."""
        if self.bias is not None:
            return self.bias if dtype is None else self.bias.to(dtype)
        parts = [layer.added(dtype) for layer in self.layers]
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return None
        pairs = zip(self.layers, parts, strict=True)
        biases = [like.new_zeros(a.out_features) if part is None else part for a, part in pairs]
        return join(biases, self.groups, torch.cat)

    def to_dense(self) -> nn.Linear:
        """Return an ordinary layer of the same function, multiplied out in double precision."""
        return as_dense(self, self.layers[0].like())


def build(
    described: Sequence[Description], letters: str, home: LayerFactors, wiring: AttentionWiring
) -> FactoredLinear | SideBySide:
    """Return the module that computes the projections `letters`, without a bias."""
    layers, sizes = dict[str, FactoredLinear](), wiring.sizes
    for description in described:
        part = "".join(name for name in letters if name in description.of)
        factors = Factors(description.shapes, description.formats, home=home, stem=f"{description.of}_")
        for names in _together(part, sizes) if description.kind in STACKS and not wiring.group_layout else part:
            layers[names] = MAKE[description.kind](description, factors, names, sizes)
    ordered = sorted(layers, key=lambda names: letters.index(names[0]))
    if len(ordered) == 1:
        return layers[ordered[0]]
    return SideBySide([layers[names] for names in ordered], wiring.group_layout)


def _together(letters: str, sizes: Sizes) -> list[str]:
    """Return the groups of projections that one layer can compute; grouped queries are wider than keys."""
    grouped = sizes.kv_heads < sizes.n_heads
    return [part for part in ([*letters[:1], letters[1:]] if grouped else [letters]) if part]


class FactoredEmbedding(nn.Module):
    """Rows of a factored matrix, looked up by token, times a scale that is kept outside the factors.

    `like` has the dtype and device of new factors; those of another embedding are shared if it is `tied`.
    """

    def __init__(
        self, described: Description, like: Tensor, scale: float, tied: FactoredEmbedding | None = None
    ) -> None:
        super().__init__()
        if tied is None:
            for part, parameter in empty_parameters(described, like).items():
                self.register_parameter(part, parameter)
        # modules in a tuple are not submodules: the factors are parameters of one module, as in the file
        self._tied = () if tied is None else (tied,)
        factors = Factors(described.shapes, described.formats, home=self.embedding)
        self._layer = (MAKE[described.kind](described, factors, "", None),)
        self.num_embeddings, self.embedding_dim = self.factors.in_features, self.factors.out_features
        self.scale = scale

    @property
    def factors(self) -> FactoredLinear:
        """The factored matrix, (tokens, width)."""
        return self._layer[0]

    @property
    def embedding(self) -> nn.Module:
        """The embedding that holds the factors."""
        return self._tied[0] if self._tied else self

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these tokens, times the scale."""
        rows = self.factors.look_up(ids)
        return rows if self.scale == 1 else rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)

    def to_dense(self) -> nn.Embedding:
        """Return a dense table of the same function, multiplied out in float64."""
        like = self.factors.like()
        table = nn.Embedding if self.scale == 1 else ScaledEmbedding
        dense = table(self.num_embeddings, self.embedding_dim, device=like.device, dtype=like.dtype)
        if isinstance(dense, ScaledEmbedding):
            dense.scale = self.scale
        with torch.no_grad():
            dense.weight.copy_(self.factors.matrix(torch.float64))
        return dense


class ScaledEmbedding(nn.Embedding):
    """Rows of a table times a number, rounded to the dtype of the table."""

    scale = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these tokens, times the scale."""
        rows = super().forward(ids)
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)


class TiedUnembedding(nn.Module):
    """Logits by the factors of an embedding: y = x E^T + b. It has no factors of its own, only the bias."""

    bias: nn.Parameter | None

    def __init__(self, embedding: FactoredEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # not a submodule, as in `FactoredEmbedding`
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.register_parameter("bias", bias)

    @property
    def embedding(self) -> FactoredEmbedding:
        """The embedding that holds the factors."""
        return self._embedding[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        y = self.embedding.factors.transposed_product(x)
        return y if self.bias is None else y + self.bias

    def to_dense(self) -> nn.Linear:
        """Return a dense layer of the same function, multiplied out in float64."""
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = self.embedding.to_dense().weight
        dense.register_parameter("bias", self.bias)
        return dense


def keep_dequantized(model: nn.Module, *, keep: bool = True) -> None:
    """Keep the dequantized factors of a model beside their integers, or drop them.

    The copy makes calls faster and takes the memory of factors in the dtype of the model. It is not saved, and does not
    follow a change of the scales.

    Parameters
    ----------
    model
        Loaded model whose factors are stored in integers.
    keep
        False to drop the copy.
    """
    for module in model.modules():
        layer = module.factors if isinstance(module, FactoredEmbedding) else module
        if isinstance(layer, FactoredLinear):
            layer.keep_values(keep=keep)


def factored_module(described: Description, original: nn.Module, scale: float) -> nn.Module:
    """Return the empty module of a factored weight with the bias of the module that it replaces.

    `scale` is that of the embeddings, which only a module of another class than `nn.Embedding` applies.
    """
    weight = cast(Tensor, original.weight)
    module: nn.Module
    if isinstance(original, nn.Embedding):
        if described.kind == "interpolative":
            raise FileFormatError(
                "from_pretrained: a table of embeddings must not be of kind 'interpolative' in config.json; compress "
                "again."
            )
        module = FactoredEmbedding(described, weight, 1.0 if type(original) is nn.Embedding else scale)
    else:
        factors = Factors(described.shapes, described.formats, empty_parameters(described, weight))
        layer = MAKE[described.kind](described, factors, "", None)
        layer.bias = getattr(original, "bias", None)
        module = layer
    module.register_parameter("weight", no_numbers(weight))
    return module


def tied_module(described: Description, embedding: FactoredEmbedding, original: nn.Module) -> nn.Module:
    """Return the module that shares the factors of an embedding: another look-up, or the unembedding."""
    if isinstance(original, nn.Embedding):
        scale = 1.0 if type(original) is nn.Embedding else embedding.scale
        return FactoredEmbedding(described, embedding.factors.like(), scale, embedding)
    return TiedUnembedding(embedding, cast(Any, original).bias)
