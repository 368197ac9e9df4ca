"""Write a compressed checkpoint folder: factors, or their products, instead of the compressed tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.engine_layouts import ENGINES, GGUF, GGUF_FILE
from tnlib_adapters.compression.methods.factorisation import Plan
from tnlib_adapters.compression.request import PAGE, REPORT
from tnlib_adapters.factors.config_section import IMPORT_FIRST, KEY, WEIGHTS_FILE, describe
from tnlib_adapters.factors.engine_tensors import DESCRIBE, ENCODE, GPTQ, stored_shapes
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.factored_matrix import Description, FactoredMatrix
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.factors.model_weights import ModelWeight, float_width, n_bytes, tensors_of, weights_of
from tnlib_adapters.factors.projections import put_together
from tnlib_adapters.files.folder import write_folder
from tnlib_adapters.files.safetensors_file import FLOATS, STORED_AS, Entry, TensorInfo, decode, encode, widest_float

Matrices = Callable[[], list[FactoredMatrix]]  # of a module, read when it is called

_CLASSES = {"t5": "AutoModelForTextEncoding"}  # of transformers, where it is neither AutoModel nor one that predicts
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # as config.json names them


def write_checkpoint(checkpoint: Checkpoint, plan: Plan, layout: str, out: Path) -> Iterator[tuple[str, int, int]]:
    """Write the compressed checkpoint into the empty folder `out`; yields (stage, done, total)."""
    config = dict(checkpoint.config)
    every = [description for of_module in plan.descriptions.values() for description in of_module]
    if layout == "factored":
        described = [description for description in every if description.is_rewritten]
        names_dtype = "dtype" in config or "torch_dtype" in config
        if not names_dtype and any(description.formats for description in described):
            # without it transformers takes the dtype of the first floats in the file, which may be scales
            config["dtype"] = _DTYPES[next(t.dtype for t in checkpoint.folder.tensors.values() if t.dtype in FLOATS)]
        config[KEY] = describe(described, checkpoint.wiring.attention_modules, plan.method)
        config[WEIGHTS_FILE] = IMPORT_FIRST
    if layout in ENGINES:
        weights = weights_of(checkpoint.wiring, checkpoint.folder.tensors)
        modules = {(own.module, own.of): own.linear.module for own in weights}
        config[KEY] = DESCRIBE[ENGINES[layout].format_of(checkpoint)](
            {modules[described.module, described.of]: _whole_weight(described)[0] for described in every}
        )
    new = _replaced(checkpoint, plan, layout)
    tensors = {file.name: _entries(checkpoint, file, new) for file in checkpoint.folder.files}
    for done, total in write_folder(checkpoint.folder, tensors, config, out, skip=(REPORT, PAGE)):
        yield "writing tensors", done, total


def loading_code(checkpoint: Checkpoint, layout: str) -> str:
    """Return the Python code that loads a compressed checkpoint from the path `folder`."""
    wiring = checkpoint.wiring
    if wiring.model_type == "tnlib_attention_only":  # transformers does not know it
        return "import tnlib_adapters; checkpoint = tnlib_adapters.open_checkpoint(folder)"
    name = "AutoModel" if wiring.unembedding is None else "AutoModelForCausalLM"
    if layout == GGUF:
        return f"import transformers; model = transformers.{name}.from_pretrained(folder, gguf_file={GGUF_FILE!r})"
    if layout in ENGINES and ENGINES[layout].format_of(checkpoint) == GPTQ:
        return "import gptqmodel; model = gptqmodel.GPTQModel.load(folder)"
    modules = "tnlib_adapters.transformers_plugin, transformers" if layout == "factored" else "transformers"
    return f"import {modules}; model = transformers.{_CLASSES.get(wiring.model_type, name)}.from_pretrained(folder)"


# dtypes and shapes of tensors by name, known before they are made, and the function that makes all of them, as stored
NewTensors = tuple[dict[str, tuple[str, tuple[int, ...]]], Callable[[], Mapping[str, Array]]]


@dataclass(frozen=True)
class _NewTensor(TensorInfo):
    """A tensor of a module, made when its turn comes to be written."""

    make: Callable[[str], Array] = field(kw_only=True)

    def read_stored(self) -> Array:
        """Return the tensor as stored."""
        return self.make(self.name)


def _lazy_entries(new: NewTensors) -> list[Entry]:
    """Return tensors that are made together when the first is written; none is kept after it was written."""
    (forms, make), tensors = new, dict[str, Array]()

    def get(name: str) -> Array:
        if not tensors:
            tensors.update(make())
        return tensors.pop(name)

    return [
        Entry(name, dtype, _NewTensor(Path(), name, dtype, shape, 0, 0, make=get))
        for name, (dtype, shape) in forms.items()
    ]


def _replaced(checkpoint: Checkpoint, plan: Plan, layout: str) -> dict[str, list[Entry]]:
    """Return the replaced tensors: the first of every module maps to all its new tensors, the others to none."""
    new, weights = dict[str, list[Entry]](), _by_module(checkpoint)
    for module, of_module in plan.descriptions.items():
        described = [description for description in of_module if description.is_rewritten]
        if not described:
            continue
        replaced = _replaced_tensors(weights[module], described, checkpoint.sizes.d_model)
        dtype = widest_float(replaced.values())

        def matrices(module: str = module) -> list[FactoredMatrix]:
            return [matrix for matrix in plan.matrices[module] if matrix.describe().is_rewritten]

        if layout in ENGINES:
            stored_as = ENGINES[layout].format_of(checkpoint)
            entries = _lazy_entries(_new_integers(weights[module], described, matrices, stored_as, replaced, dtype))
        elif layout == "dense":
            entries = _lazy_entries(_new_dense(checkpoint, weights[module], matrices, replaced, dtype))
        else:
            entries = _lazy_entries(_new_factors(checkpoint, described, matrices, dtype))
            # Empty tensors under the names of the weights: software that does not know factors refuses the folder
            # instead of initialising the weights at random.
            empty = np.empty(0, STORED_AS[dtype])
            entries += [Entry(name, dtype, empty) for name in replaced if name.endswith(".weight")]
        first, *others = replaced
        new |= {first: entries, **{name: [] for name in others}}
    for name, values in plan.vectors.items():
        dtype = checkpoint.folder.tensors[name].dtype
        new[name] = [Entry(name, dtype, encode_in_range(name, values, dtype))]
    return new


def _new_factors(
    checkpoint: Checkpoint, described: Sequence[Description], matrices: Matrices, dtype: str
) -> NewTensors:
    def make() -> dict[str, Array]:
        arrays = dict[str, Array]()
        for matrix in matrices():
            description = matrix.describe()
            for part, values in matrix.parts().items():
                name, own_dtype = description.stored_name(part, checkpoint.wiring), description.tensors[part][0]
                if own_dtype is None:
                    arrays[name] = encode_in_range(name, values, dtype)
                else:
                    _check_range(name, decode(values, own_dtype), values, own_dtype)
                    arrays[name] = values
        return arrays

    forms = {
        description.stored_name(part, checkpoint.wiring): (own_dtype or dtype, shape)
        for description in described
        for part, (own_dtype, shape) in description.tensors.items()
    }
    return forms, make


def _new_dense(
    checkpoint: Checkpoint,
    weights: Sequence[ModelWeight],
    matrices: Matrices,
    replaced: Mapping[str, TensorInfo],
    dtype: str,
) -> NewTensors:
    """Return the tensors of a module of the products of its factors, under their original names."""
    first = weights[0]

    def make() -> dict[str, Array]:
        # without a name for the products, which would stay in memory beside the tensors that are made from them
        if first.of:
            attention = checkpoint.wiring.layers[first.group].attention
            dense = put_together(attention, expand(matrices(), checkpoint.sizes))
        else:
            on_rows = first.linear.on_rows(expand(matrices(), checkpoint.sizes).weights[first.module])
            dense = {first.weight.name: np.ascontiguousarray(on_rows)}
            del on_rows
        return {name: encode_in_range(name, dense[name], dtype) for name in replaced}

    return {name: (dtype, info.shape) for name, info in replaced.items()}, make


def _new_integers(
    weights: Sequence[ModelWeight],
    described: Sequence[Description],
    matrices: Matrices,
    stored_as: str,
    replaced: Mapping[str, TensorInfo],
    dtype: str,
) -> NewTensors:
    """Return the tensors of a module in the integers of an engine, and its biases."""
    by_name = {own.of: own for own in weights}

    def make() -> dict[str, Array]:
        arrays = dict[str, Array]()
        for matrix in matrices():
            own, (integers,) = by_name[matrix.of], matrix.integers.values()
            encode_in_range(own.weight.name, integers.scales, "F16" if stored_as == GGUF else "BF16")
            encoded = ENCODE[stored_as](integers.transposed() if integers.format.axes == (1,) else integers)
            arrays |= {f"{own.linear.module}.{name}": array for name, (_, array) in encoded.items()}
            if own.bias is not None and own.bias.name in replaced:
                arrays[own.bias.name] = encode_in_range(own.bias.name, matrix.arrays["bias"], dtype)
        return arrays

    forms = dict[str, tuple[str, tuple[int, ...]]]()
    for description in described:
        own = by_name[description.of]
        shapes = stored_shapes(stored_as, *_whole_weight(description))
        forms |= {f"{own.linear.module}.{name}": form for name, form in shapes.items()}
        if own.bias is not None and own.bias.name in replaced:
            forms[own.bias.name] = dtype, own.bias.shape
    return forms, make


def _whole_weight(description: Description) -> tuple[IntegerFormat, tuple[int, ...]]:
    """Return format and shape (in, out) of a whole weight in integers; a table has one scale or more in every row."""
    ((part, form),) = description.formats.items()
    shape = description.shapes[part]
    return form, shape[::-1] if form.axes == (1,) else shape


def _by_module(checkpoint: Checkpoint) -> dict[str, list[ModelWeight]]:
    weights = dict[str, list[ModelWeight]]()
    for own in weights_of(checkpoint.wiring, checkpoint.folder.tensors):
        weights.setdefault(own.module, []).append(own)
    return weights


def _replaced_tensors(
    weights: Sequence[ModelWeight], described: Sequence[Description], d_model: int
) -> dict[str, TensorInfo]:
    """Return the tensors of the weights of a module that its matrices replace, by name."""
    factored = {of for description in described for of in description.of or ("",)}
    biased = {of for description in described for of in description.held_biases(d_model)}
    replaced = dict[str, TensorInfo]()
    for own in weights:
        letters = {other.of for other in weights if other.linear == own.linear}
        replaced |= {own.weight.name: own.weight} if letters <= factored else {}
        replaced |= {own.bias.name: own.bias} if own.bias is not None and letters <= biased else {}
    return replaced


def plan_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Return the bytes of the tensors of the compressed part in the factored layout; row indices are in config.json.

    The tensors of a module are written in the widest dtype of those that they replace; others are copied.
    """
    total, weights = 0, _by_module(checkpoint)
    for module, described in plan.descriptions.items():
        replaced = _replaced_tensors(weights[module], described, checkpoint.sizes.d_model)
        float_bits = float_width(replaced.values())
        total += sum(description.n_bits(float_bits) for description in described) // 8
        total += n_bytes(info for name, info in tensors_of(weights[module]).items() if name not in replaced)
    return total


def encode_in_range(name: str, values: Array, dtype: str) -> Array:
    """Return `values` as a dtype of safetensors stores them, refusing numbers beyond its range."""
    with np.errstate(over="ignore"):  # refused below, with the name of the tensor
        stored = encode(values, dtype)
    _check_range(name, values, stored, dtype)
    return stored


def _check_range(name: str, values: Array, stored: Array, dtype: str) -> None:
    if not np.isfinite(decode(stored, dtype)).all():
        raise ArgumentError(
            f"compress: tensor {name!r} would hold {np.abs(values).max():.3g}, out of range for its dtype {dtype}; "
            "use another method or layout, or convert the checkpoint to F32 first."
        )


def _entries(checkpoint: Checkpoint, file: Path, new: Mapping[str, list[Entry]]) -> list[Entry]:
    """Return the tensors of a weight file in their order, with replacements."""
    entries: list[Entry] = []
    for name, info in checkpoint.folder.tensors.items():
        if info.file == file:
            entries += new[name] if name in new else [Entry(name, info.dtype, info)]
    return entries
