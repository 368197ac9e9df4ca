"""Read the attention weights of a loaded transformers model, without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.architectures.resolve_wiring import wire
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.attention.layer_arguments import layer_arguments, per_head
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.factors.projections import stored_shapes, take_apart

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
