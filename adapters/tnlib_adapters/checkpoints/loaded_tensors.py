"""Parameters of a transformers model in memory, under the names that its file gives them, without a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.architectures.resolve_wiring import wire
from tnlib_adapters.architectures.wiring import ExpertsWiring, Wiring
from tnlib_adapters.attention.layer_arguments import named_parameters, plain_name, wire_model
from tnlib_adapters.files.folder import WEIGHTS, Folder
from tnlib_adapters.files.safetensors_file import STORED_AS, TensorInfo, check_finite, decode

FUNCTION = "open_model"

# package -> attribute of its models that is the transformers model; torch.compile's is a submodule
_WRAPPERS = {"nnsight": "_module", "transformer_lens": "original_model", "torch": "_orig_mod"}
# torch's name -> safetensors' name
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}


@dataclass(frozen=True)
class LoadedTensor(TensorInfo):
    """A tensor of a model in memory; reading it returns a read-only view, half precision a float32 copy."""

    tensor: Any = field(kw_only=True, compare=False)

    def read_stored(self) -> Array:
        """Return the numbers, refusing a parameter of another dtype or shape; bfloat16 as uint16 bit patterns."""
        import torch

        dtype, shape = _dtype(self.tensor), tuple(self.tensor.shape)
        if (dtype, shape) != (self.dtype, self.shape):
            raise ArgumentError(
                f"{FUNCTION}: parameter {self.name!r} must be {self.dtype} of shape {self.shape}, as when the model "
                f"was opened, got {dtype} of shape {shape}; open the model again."
            )
        on_cpu = self.tensor.detach().cpu()
        array: Array = on_cpu.view(torch.uint16).numpy() if self.dtype == "BF16" else on_cpu.numpy()
        view = array.view()
        view.flags.writeable = False
        return view

    def read_part(self, index: tuple[slice, ...]) -> Array:
        """Return the numbers of some rows and columns, refusing NaN and inf."""
        part = decode(np.array(self.read_stored()[index]), self.dtype)
        check_finite(self.name, self.file, part)
        return part


def _dtype(tensor: Any) -> str | None:
    """Return the name of its dtype in safetensors, None for one that is not supported."""
    return _DTYPES.get(str(tensor.dtype).removeprefix("torch."))


def is_loaded_model(model: Any) -> bool:
    """Test if this is a model in memory: one of transformers, or one that nnsight or TransformerLens wraps."""
    model = _inner(model)
    return hasattr(model, "named_parameters") and hasattr(getattr(model, "config", None), "to_dict")


def folder_of_model(model: Any) -> Folder:
    """Return the configuration and the parameters of a model as those of a checkpoint folder.

    The path is that of the folder it was loaded from, if there is one, so that its tokenizer is found.
    """
    if not is_loaded_model(model):
        raise ArgumentTypeError(
            f"{FUNCTION}: model must be a model of transformers, got {type(model).__name__}; pass what from_pretrained "
            "returned."
        )
    if vars(model).get("_weights_processed", False):
        raise ArgumentError(
            f"{FUNCTION}: weights of model must be those of transformers, got a {type(model).__name__} with folded "
            "ones; pass it before enable_compatibility_mode, and fold the checkpoint."
        )
    model = _inner(model)
    loaded = wire_model(model, FUNCTION)
    origin = Path(str(getattr(model, "name_or_path", "") or ""))
    path = origin if origin.name and origin.is_dir() else Path(f"({type(model).__name__} in memory)")
    config = model.config.to_dict()
    tensors = {name: _tensor(path / WEIGHTS, name, value) for name, value in _stored_tensors(model, loaded, config)}
    return Folder(path, config, tensors, (), {"format": "pt"})


def _inner(model: Any) -> Any:
    """Return the transformers model inside one of nnsight or TransformerLens; anything else as it is."""
    attribute = _WRAPPERS.get(type(model).__module__.partition(".")[0])
    if attribute is None:
        return model
    attributes = vars(model)  # attributes of wrappers are looked up in the model
    return attributes.get(attribute, attributes.get("_modules", {}).get(attribute, model))


def _stored_tensors(model: Any, loaded: Wiring, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and stored buffers by the names that save_pretrained gives them."""
    stored = set(model.state_dict())
    buffers = [(plain_name(name), value) for name, value in model.named_buffers() if name in stored]
    experts = _experts_by_module(loaded, config)
    for name, value in (*named_parameters(model), *buffers):
        module, _, parameter = name.rpartition(".mlp.")
        if module not in experts:
            for in_file, in_memory in loaded.in_memory.items():
                name = name.replace(in_memory, in_file)
            yield name, value
        elif parameter == "experts.gate_up_proj":
            for expert, both in zip(experts[module].experts, value, strict=True):
                gate, up = both.chunk(2)
                yield from ((expert.gate.weight, gate), (expert.up.weight, up))  # type: ignore[union-attr]
        elif parameter == "experts.down_proj":
            yield from ((expert.down.weight, down) for expert, down in zip(experts[module].experts, value, strict=True))
        else:
            yield experts[module].router.module.removesuffix("gate") + parameter, value


def _experts_by_module(loaded: Wiring, config: Mapping[str, Any]) -> dict[str, ExpertsWiring]:
    """Return the names of experts in a file by the module of their layer in the loaded model, one tensor for all."""
    in_file = wire(config, (), where="the config of the model", function=FUNCTION, prefix=loaded.prefix)
    pairs = zip(loaded.layers, in_file.layers, strict=True)
    return {layer.module: stored.experts for layer, stored in pairs if stored.experts is not None}


def _tensor(file: Path, name: str, value: Any) -> LoadedTensor:
    dtype = _dtype(value)
    if dtype is None or value.is_meta:
        raise ArgumentError(
            f"{FUNCTION}: parameter {name!r} must hold floating-point numbers, got {value.dtype} on {value.device}; "
            "load the weights, dequantized."
        )
    shape = tuple(value.shape)
    return LoadedTensor(file, name, dtype, shape, 0, math.prod(shape) * STORED_AS[dtype].itemsize, tensor=value)
