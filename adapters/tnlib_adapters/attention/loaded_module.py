"""Read the attention weights of a loaded transformers model, without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.architectures.table import Architecture, find_row
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.attention.layer_arguments import layer_arguments, per_head
from tnlib_adapters.factors.projections import Sizes, module_names, n_out, read_sizes, take_apart, weight_shape

FUNCTION = "Attention.from_module"


def module_arguments(model: Any, layer: int, length: int | None) -> dict[str, Any]:
    """Return the arguments of `Attention` for one layer of a model."""
    if not hasattr(model, "named_parameters") or not hasattr(getattr(model, "config", None), "to_dict"):
        raise ArgumentTypeError(
            f"{FUNCTION}: model must be a model of transformers, got {type(model).__name__}; "
            "pass what from_pretrained returned."
        )
    config = model.config.to_dict()
    row = find_row(config, f"the config of {type(model).__name__}", FUNCTION)
    sizes = read_sizes(row, config, f"the config of {type(model).__name__}", FUNCTION)
    layer = as_index(FUNCTION, "layer", layer, sizes.n_layers)
    get = _reader(model, row, layer)
    _check(row, sizes, layer, get)
    base = row.attention.format(layer=layer)
    arguments = layer_arguments(
        row, config, sizes, layer, lambda name: get(f"{base}.{name}"), length=length, function=FUNCTION
    )
    return arguments | per_head(take_apart(row, sizes, "", layer, get), sizes)


def _reader(model: Any, row: Architecture, layer: int) -> Callable[[str], Array | None]:
    """Return a function that loads a tensor by its name in files, for any prefix in this model."""
    parameters = dict(model.named_parameters())
    probe = in_memory(row, next(iter(module_names(row, "", layer))) + ".weight")
    prefixes = [name.removesuffix(probe) for name in parameters if name == probe or name.endswith(f".{probe}")]
    if len(prefixes) != 1:
        raise ArgumentError(
            f"{FUNCTION}: model must hold one parameter {probe!r} as a {row.model_type} does, found {len(prefixes)} in "
            f"{type(model).__name__}; pass the part of the model that has the attention, as it came from transformers."
        )

    def get(name: str) -> Array | None:
        tensor = parameters.get(prefixes[0] + in_memory(row, name))
        return None if tensor is None else _as_numpy(name, tensor)

    return get


def in_memory(row: Architecture, name: str) -> str:
    """Return the name of a checkpoint tensor in a loaded transformers model."""
    for part, loaded in row.in_memory.items():
        name = name.replace(part, loaded)
    return name


def _as_numpy(name: str, tensor: Any) -> Array:
    if tensor.is_meta or not tensor.is_floating_point():
        raise ArgumentError(
            f"{FUNCTION}: parameter {name!r} must hold floating-point numbers, got {tensor.dtype} on {tensor.device}; "
            "load the weights, dequantized."
        )
    on_cpu = tensor.detach().cpu()
    array: Array = (on_cpu if on_cpu.element_size() >= 4 else on_cpu.float()).numpy()
    return array


def _check(row: Architecture, sizes: Sizes, layer: int, get: Callable[[str], Array | None]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    biases: dict[str, tuple[int, ...]] = {}
    for module, projections in module_names(row, "", layer).items():
        expected[f"{module}.weight"] = weight_shape(row, sizes, projections)
        biases[f"{module}.bias"] = (n_out(sizes, projections),)
    for norm in row.qk_norm or ():
        expected[f"{row.attention.format(layer=layer)}.{norm}.weight"] = (sizes.d_head,)
    for name, shape in (expected | biases).items():
        array = get(name)
        if (array is None and name in expected) or (array is not None and array.shape != shape):
            shape_in_model = "none" if array is None else str(array.shape)
            raise ArgumentError(
                f"{FUNCTION}: parameter {name!r} must have shape {shape} by the config of the model, got "
                f"{shape_in_model}; pass a model as it came from transformers."
            )
