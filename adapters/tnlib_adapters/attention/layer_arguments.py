"""Arguments of `Attention` for one layer, from a checkpoint or a loaded transformers model, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.architectures.resolve_wiring import wire
from tnlib_adapters.architectures.wiring import AttentionWiring, Wiring
from tnlib_adapters.attention.norms import HeadNorm, LatentNorm
from tnlib_adapters.attention.relative_bias import RelativeBias
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.factors.projections import Projections, stored_shapes, take_apart


def layer_arguments(
    attention: AttentionWiring, get: Callable[[str], Array | None], *, length: int | None, function: str
) -> dict[str, Any]:
    """Return all arguments except weights and biases; `get` loads a tensor by its name."""
    turning = attention.frequencies(length, function)
    return {
        "scale": attention.scale,
        "rotary": turning and Rotary(turning.radians, pairs=attention.pairs, factor=turning.factor),
        "alibi": attention.alibi and np.array(attention.alibi),
        "relative_bias": _relative_bias(attention, get),
        "head_norm": _head_norm(attention, get, function),
        "latent_norm": _latent_norm(attention, get, function),
        "softcap": attention.softcap,
        "causal": attention.causal,
        "window": attention.window,
        "context": turning.context if turning else attention.context,
        "cross": attention.cross,
    }


def per_head(projections: Projections, sizes: Sizes) -> dict[str, Any]:
    """Split weights and biases into heads."""
    counts = {"q": sizes.n_heads, "k": sizes.kv_heads, "v": sizes.kv_heads, "o": sizes.n_heads}
    weights = {f"W_{n.upper()}": _split(w, counts[n], inner_first=n == "o") for n, w in projections.weights.items()}
    biases = {f"b_{n.upper()}": b if n == "o" else b.reshape(counts[n], -1) for n, b in projections.biases.items()}
    return weights | biases


def _relative_bias(attention: AttentionWiring, get: Callable[[str], Array | None]) -> RelativeBias | None:
    bias = attention.relative_bias
    table = None if bias is None else get(bias.table.weight)  # bins h
    if table is None or bias is None:
        return None
    return RelativeBias(np.ascontiguousarray(table.T), bias.max_distance, one_sided=attention.causal)


def _head_norm(attention: AttentionWiring, get: Callable[[str], Array | None], function: str) -> HeadNorm | None:
    if not attention.head_norms:
        return None
    weights = [(norm, get(norm.weight)) for norm in attention.head_norms]
    query, key = (None if weight is None else norm.offset + weight for norm, weight in weights)
    if query is None or key is None:
        return None
    return HeadNorm(query, key, attention.head_norms[0].required_eps(function))


def _latent_norm(attention: AttentionWiring, get: Callable[[str], Array | None], function: str) -> LatentNorm | None:
    latent = attention.latent
    if latent is None:
        return None
    query = None if latent.query_down is None else get(latent.query_down.weight)
    down = get(latent.down.weight)
    if down is None:
        return None
    return LatentNorm(
        query=query if query is None or latent.query_down is None else latent.query_down.on_rows(query),
        key_value=latent.down.on_rows(down)[:, : latent.rank],
        eps=latent.norm.required_eps(function),
        n_rotated=latent.n_rotated,
    )


def _split(weight: Array, n_heads: int, *, inner_first: bool) -> Array:
    """Split the inner dimension of a projection into heads: (head, d_model, d_head), or (head, d_head, d_model)."""
    if inner_first:
        return weight.reshape(n_heads, -1, weight.shape[1])  # h dh d
    return np.ascontiguousarray(weight.reshape(len(weight), n_heads, -1).transpose(1, 0, 2))  # h d dh


FUNCTION = "Attention.from_module"


def module_arguments(model: Any, layer: int, length: int | None) -> dict[str, Any]:
    """Return the arguments of `Attention` for one layer of a model."""
    if not hasattr(model, "named_parameters") or not hasattr(getattr(model, "config", None), "to_dict"):
        raise ArgumentTypeError(
            f"{FUNCTION}: model must be a model of transformers, got {type(model).__name__}; "
            "pass what from_pretrained returned."
        )
    wiring = wire_model(model, FUNCTION)
    attention = wiring.layers[as_index(FUNCTION, "layer", layer, wiring.sizes.n_layers)].attention
    parameters = dict(named_parameters(model))

    def get(name: str) -> Array | None:
        return _as_numpy(name, parameters[name]) if name in parameters else None

    for name, shape in stored_shapes(attention).items():
        array = get(name)
        if array is None or array.shape != shape:
            raise ArgumentError(
                f"{FUNCTION}: parameter {name!r} must have shape {shape} by the config of the model, got "
                f"{'none' if array is None else array.shape}; pass a model as it came from transformers."
            )
    arguments = layer_arguments(attention, get, length=length, function=FUNCTION)
    return arguments | per_head(take_apart(attention, get), wiring.sizes)


def wire_model(model: Any, function: str) -> Wiring:
    """Return the wiring of a loaded transformers model, by the names of its parameters."""
    config, where = model.config.to_dict(), f"the config of {type(model).__name__}"
    names = [name for name, _ in named_parameters(model)]
    bare = wire(config, (), where=where, function=function, prefix="", loaded=True)
    probe = next(iter(bare.layers[0].attention.projections.values())).weight
    prefixes = [name.removesuffix(probe) for name in names if name == probe or name.endswith(f".{probe}")]
    if len(prefixes) != 1:
        raise ArgumentError(
            f"{function}: model must hold one parameter {probe!r} as a {bare.model_type} does, found {len(prefixes)} "
            f"in {type(model).__name__}; pass the part of the model that has the attention, as it came from "
            "transformers, adapters merged."
        )
    return wire(config, set(names), where=where, function=function, prefix=prefixes[0], loaded=True)


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a model by their names in transformers, which hooks of TransformerLens lengthen.

    TransformerLens holds a parameter under several names, of which torch gives the first one, by default.
    """
    parameters = dict(model.named_parameters())
    if any(plain_name(name) != name for name in parameters):
        parameters = {plain_name(name): value for name, value in model.named_parameters(remove_duplicate=False)}
    return iter(parameters.items())


def plain_name(name: str) -> str:
    """Return the name of a parameter without the modules that TransformerLens puts around its own."""
    return name.replace("._original_component", "")


def _as_numpy(name: str, tensor: Any) -> Array:
    if tensor.is_meta or not tensor.is_floating_point():
        raise ArgumentError(
            f"{FUNCTION}: parameter {name!r} must hold floating-point numbers, got {tensor.dtype} on {tensor.device}; "
            "load the weights, dequantized."
        )
    on_cpu = tensor.detach().cpu()
    array: Array = (on_cpu if on_cpu.element_size() >= 4 else on_cpu.float()).numpy()
    return array
