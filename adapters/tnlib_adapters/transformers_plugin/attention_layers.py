"""From the description of a layer's factors to the modules that compute with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tnlib import FileFormatError
from tnlib_adapters.factors.attention_factors import ranks_of, rows_of_stack, scale_name
from tnlib_adapters.factors.projections import Sizes, n_out
from tnlib_adapters.transformers_plugin.factored_linear import (
    Borrowed,
    Cost,
    FactoredLinear,
    Factors,
    LowRankLinear,
    TTLinear,
    as_dense,
    shapes,
)
from tnlib_adapters.transformers_plugin.head_linear import IntoHeads, OutOfHeads
from tnlib_adapters.transformers_plugin.interpolative_linear import InterpolativeLinear
from tnlib_adapters.transformers_plugin.tucker_cp_linear import CPLinear, TuckerLinear

Described = Mapping[str, Any]


class LayerFactors(nn.Module):
    """The factors of one layer, under the names they have in files."""

    def __init__(self, described: Sequence[Described], like: Tensor) -> None:
        super().__init__()
        for piece in described:
            scales = piece.get("scales", {})
            for part, shape in piece["shapes"].items():
                whole = part in scales
                empty = torch.empty(shape, dtype=torch.int8 if whole else like.dtype, device=like.device)
                self.register_parameter(f"{piece['of']}_{part}", nn.Parameter(empty, requires_grad=not whole))
            for part, shape in scales.items():
                scale = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
                self.register_parameter(f"{piece['of']}_{scale_name(part)}", scale)

    def extra_repr(self) -> str:
        """Return the shapes."""
        return ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.named_parameters())


class DenseLinear(FactoredLinear):
    """A matrix that no factors would make smaller, or a stack of them of which `first` count."""

    def __init__(
        self,
        factors: Factors | Borrowed,
        part: str,
        inputs: Sequence[int] = (0,),
        outputs: Sequence[int] = (1,),
        first: slice | None = None,
    ) -> None:
        sizes = list(shapes(factors, part)[0])
        if first is not None:
            sizes[0] = len(range(*first.indices(sizes[0])))
        n_in, n_written = (math.prod(sizes[leg] for leg in legs) for legs in (inputs, outputs))
        super().__init__(factors, (n_in, n_written))
        self._part, self._order, self._first = part, (*inputs, *outputs), first

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        return x @ self.matrix()

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        stack = self.part(self._part, dtype)
        chosen = stack if self._first is None else stack[self._first]
        return chosen.permute(self._order).reshape(self.in_features, self.out_features)

    def cost(self) -> Cost:
        """Return the entries of W, and nothing to form."""
        return Cost(self.in_features * self.out_features, 0)


class SideBySide(nn.Module):
    """Layers of one input that write side by side, where one module makes queries, keys and values.

    `groups` is the count of key and value heads where the queries, the key and the value of each stand together.
    """

    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[FactoredLinear], groups: int | None, d_head: int) -> None:
        super().__init__()
        self.layers, self.groups, self.d_head = nn.ModuleList(layers), groups, d_head
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return what all layers write."""
        y = self._join([layer(x) for layer in self.layers])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W of shape (in_features, out_features), multiplied out."""
        return self._join([cast(FactoredLinear, layer).matrix(dtype) for layer in self.layers])

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return what is added to every row, or None."""
        if self.bias is not None:
            return self.bias if dtype is None else self.bias.to(dtype)
        layers = [cast(FactoredLinear, layer) for layer in self.layers]
        parts = [layer.added(dtype) for layer in layers]
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return None
        pairs = zip(layers, parts, strict=True)
        return self._join([like.new_zeros(a.out_features) if part is None else part for a, part in pairs])

    def to_dense(self) -> nn.Linear:
        """Return an ordinary layer of the same function, multiplied out in double precision."""
        return as_dense(self, cast(FactoredLinear, self.layers[0]).like())

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        if self.groups is None:
            return torch.cat([*parts], -1)
        legs = [part.reshape(*part.shape[:-1], self.groups, -1, self.d_head) for part in parts]  # ... group heads dh
        return torch.cat(legs, -2).flatten(-3)


def build(
    described: Sequence[Described], held: str, home: LayerFactors, sizes: Sizes, fused: Literal["blocks", "groups"]
) -> FactoredLinear | SideBySide:
    """Return the module that stands for the projections `held`, without a bias of its own.

    Raises
    ------
    FileFormatError
        If the factors do not fit together, or not to the sizes of the model.
    """
    layers: dict[str, FactoredLinear] = {}
    for piece in described:
        own = "".join(name for name in held if name in piece["of"])
        for names in _together(own, sizes) if piece["kind"] in STACKS and fused == "blocks" else own:
            try:
                layers[names] = MAKE[piece["kind"]](piece, names, home, sizes)
                _check(layers[names], names, sizes)
            except (LookupError, ValueError, AttributeError) as problem:  # a part is missing, or shapes do not fit
                raise FileFormatError(
                    f"from_pretrained: the factors of projections {piece['of']!r} do not make a layer of kind "
                    f"{piece['kind']!r} ({problem}); compress again."
                ) from None
    ordered = sorted(layers, key=lambda names: held.index(names[0]))
    if len(ordered) == 1:
        return layers[ordered[0]]
    return SideBySide([layers[names] for names in ordered], sizes.kv_heads if fused == "groups" else None, sizes.d_head)


def _together(own: str, sizes: Sizes) -> list[str]:
    """Return which of these projections one layer can write side by side: grouped queries are more than keys."""
    grouped = sizes.kv_heads < sizes.n_heads
    return [part for part in ([*own[:1], own[1:]] if grouped else [own]) if part]


def _check(layer: FactoredLinear, names: str, sizes: Sizes) -> None:
    wanted = (sizes.widths["o"] if names == "o" else sizes.d_model, n_out(sizes, names))
    if (layer.in_features, layer.out_features) != wanted:
        raise ValueError(f"weights of {(layer.in_features, layer.out_features)} where the model has {wanted}")


def _borrowed(piece: Described, home: LayerFactors, **parts: str) -> Borrowed:
    """Return all parts of a piece, or those that are given another name."""
    names = parts or {part: part for part in piece["shapes"]}
    return Borrowed(home, {here: f"{piece['of']}_{there}" for here, there in names.items()})


def _dense(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    return DenseLinear(_borrowed(piece, home), "weight")


def _low_rank(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    return LowRankLinear(_borrowed(piece, home))


def _ttm(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    return TTLinear(_borrowed(piece, home))


def _tucker(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    return TuckerLinear(_borrowed(piece, home), *_legs(piece, names))


def _cp(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    return CPLinear(_borrowed(piece, home), *_legs(piece, names))


def _stack(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    return DenseLinear(_borrowed(piece, home), "stack", *_legs(piece, names))


def _legs(piece: Described, names: str) -> tuple[tuple[int, ...], tuple[int, ...], slice]:
    """Return the legs of `stack` that are read, those that are written, and the rows of the first that count."""
    shape = piece["shapes"].get("stack") or piece["shapes"]["factor0"]
    rows = rows_of_stack(shape[0], piece["of"])
    if names == "o":
        return (1, 0, 3), (2,), rows["o"]
    return (2,), (1, 0, 3) if names == "q" else (0, 1, 3), slice(rows[names[0]].start, rows[names[-1]].stop)


def _heads(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    d_head = sizes.d_head
    ranks = ranks_of(names, piece["ranks"], sizes)
    if names == piece["of"][0]:
        return IntoHeads(_borrowed(piece, home, factor="left"), ranks, d_head, sizes.d_model)
    right = _borrowed(piece, home, factor="right")
    if names == "o":
        return OutOfHeads(right, ranks, d_head)
    return IntoHeads(right, ranks, d_head, sizes.d_model, transposed=True)


def _interpolative(piece: Described, names: str, home: LayerFactors, sizes: Sizes) -> FactoredLinear:
    n_in = sizes.widths["o"] if names == "o" else sizes.d_model
    return InterpolativeLinear(_borrowed(piece, home), piece["rows"], n_in)


MAKE: Mapping[str, Callable[[Described, str, LayerFactors, Sizes], FactoredLinear]] = {
    "dense": _dense,
    "low_rank": _low_rank,
    "ttm": _ttm,
    "heads": _heads,
    "interpolative": _interpolative,
    "tucker": _tucker,
    "cp": _cp,
    "stack": _stack,
}
STACKS = ("tucker", "cp", "stack")  # kinds of all projections as one array, which share what they compute
