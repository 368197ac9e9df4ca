"""Export encoders to folders with an ONNX graph, which onnxruntime and sentence-transformers run.

Weights that a folder stores as integers (`factors.engine_tensors`) keep their codes and scales in the graph; the table
of token embeddings is rounded to 8 bits. onnxruntime rounds activations to 8 bits too (`accuracy_level` 4).
The operators are MatMulNBits and GatherBlockQuantized of onnxruntime.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_path, import_optional
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.factors.engine_tensors import IntegerTensor
from tnlib_adapters.factors.integers import IntegerFormat, pack
from tnlib_adapters.factors.rounding import round_to_nearest
from tnlib_adapters.files.atomic_folder import check_target, check_text_path, whole_folder
from tnlib_adapters.files.folder import copy_other_files, without_note
from tnlib_adapters.transformers_plugin.inference_layers import use_linear_layers
from tnlib_adapters.transformers_plugin.quantizer import find_place

GRAPH = "onnx/model.onnx"  # where sentence-transformers and optimum look for it
_OUTPUT = "last_hidden_state"
_REPORTS = ("tnlib_report.json", "tnlib_report.html")  # of the factors, which the graph does not hold
_OPSET = 20  # the first with Gelu, one operation for onnxruntime
_LARGEST = 2**31 - 2**26  # bytes of weights in one file: protobuf reads 2 GiB


def export_onnx(folder: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write an encoder as an ONNX graph with config, tokenizer and pooling beside it, and return the path of the graph.

    The output is `last_hidden_state`, (texts, tokens, width). Inputs are `input_ids`, `attention_mask` and, if the
    model has several token types, `token_type_ids`, of any numbers of texts and tokens; or `pixel_values` with any
    number of images. Numbers are float32.

    Parameters
    ----------
    folder
        Folder of an encoder, compressed or not. Factored layers are those of `use_linear_layers`. Integers of layout
        "onnxruntime" stay integers, of which the graph is as small as the folder, and word embeddings take 8 bits.
    out
        Folder to create; it appears complete or not at all.
    force
        Replace `out` if it is not empty.

    Raises
    ------
    ArgumentError
        If the model is no encoder, or `out` cannot be made.
    FileFormatError
        If `folder` is not a checkpoint of a known architecture.

    Examples
    --------
    >>> import numpy as np, onnxruntime, os, tempfile, transformers
    >>> folder, out = (os.path.join(tempfile.mkdtemp(), k) for k in ("bert", "onnx"))
    >>> sizes = {
    ...     "hidden_size": 32,
    ...     "num_hidden_layers": 1,
    ...     "num_attention_heads": 2,
    ...     "intermediate_size": 64,
    ... }
    >>> config = transformers.BertConfig(vocab_size=100, **sizes)
    >>> transformers.BertModel(config).save_pretrained(folder)
    >>> session = onnxruntime.InferenceSession(export_onnx(folder, out))
    >>> ids = np.ones((3, 7), np.int64)
    >>> feed = {"input_ids": ids, "attention_mask": ids, "token_type_ids": 0 * ids}
    >>> session.run(None, feed)[0].shape
    (3, 7, 32)
    """
    import_optional(__name__, "onnxscript", "'tnlib[onnx]'")
    target, checkpoint = as_path("export_onnx", "out", out), open_checkpoint(folder)
    _check_encoder(checkpoint)
    check_weights(integer_weights(checkpoint))
    check_text_path("export_onnx", "folder", checkpoint.folder.path)
    check_target("export_onnx", target, checkpoint.folder.path, force=force)
    model = _load(checkpoint)
    with whole_folder(target) as partial:
        (partial / GRAPH).parent.mkdir()
        _write_graph(model, _sample(checkpoint.wiring, model.config), partial / GRAPH)
        vars(model.config).pop("quantization_config", None)  # the graph holds no factors
        model.config.save_pretrained(partial)
        copy_other_files(checkpoint.folder, partial, _REPORTS)
        card = partial / "README.md"
        if card.is_file():  # it states how the factors load
            card.write_bytes(without_note(card.read_bytes()))
        check_target("export_onnx", target, checkpoint.folder.path, force=force)
    return target / GRAPH


def _check_encoder(checkpoint: Checkpoint) -> None:
    wiring = checkpoint.wiring
    if wiring.encoder is not None:
        raise ArgumentError(
            f"export_onnx: folder must hold an encoder alone, got a {wiring.model_type} with an encoder and a decoder; "
            "save the encoder in a folder of its own."
        )
    if any(layer.attention.causal for layer in wiring.layers):
        raise ArgumentError(
            f"export_onnx: folder must hold an encoder such as BERT, got a {wiring.model_type}, whose attention is "
            "causal; docs/serving.md lists engines for such models."
        )


def _load(checkpoint: Checkpoint) -> Any:
    """Return the model in float32, with ordinary linear layers."""
    import transformers

    name = "AutoModelForTextEncoding" if checkpoint.wiring.layers[0].attention.relative_bias else "AutoModel"
    options = {"dtype": torch.float32, "attn_implementation": "eager"}  # without the tests for rows that are all masked
    loader, integers = getattr(transformers, name), integer_weights(checkpoint)
    source: Path | None = checkpoint.folder.path
    if integers:  # read here: transformers would need the package of the format
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder.path)
        vars(config).pop("quantization_config", None)
        replaced = torch.zeros(())
        options |= {
            "config": config,
            "state_dict": {
                name: replaced.expand(info.shape) if name in integers else torch.from_numpy(np.array(info.read()))
                for name, info in checkpoint.folder.tensors.items()
            },
        }
        with torch.device("meta"):
            loader, source = type(loader.from_config(config)), None
    with _quiet("transformers"):  # poolers and heads of other tasks, which the graph does not have
        model = loader.from_pretrained(source, **options)
    return use_integers(model.eval(), checkpoint) if integers else use_linear_layers(model.eval())


def _sample(wiring: Wiring, config: Any) -> dict[str, Tensor]:
    """Return inputs by name; the sizes of their first two axes, of texts, or of the first, of images, are examples."""
    if wiring.reads == "images":
        return {"pixel_values": torch.zeros(2, config.num_channels, config.image_size, config.image_size)}
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if getattr(config, "type_vocab_size", 1) > 1 else []
    return {name: torch.full((2, 8), int(name == "attention_mask")) for name in names}


class _HiddenStates(nn.Module):
    """The last hidden states of an encoder, from inputs in a given order."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the hidden states, (texts, tokens, width)."""
        hidden: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        return hidden


def _write_graph(model: nn.Module, sample: Mapping[str, Tensor], file: Path) -> None:
    axes = [torch.export.Dim("texts"), torch.export.Dim("tokens")]
    dynamic = tuple(dict(enumerate(axes[: 2 if x.ndim == 2 else 1])) for x in sample.values())
    with _quiet("torch.onnx"), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter about itself and about packages that it does not find
        program: Any = torch.onnx.export(
            _HiddenStates(model, [*sample]).eval(),
            tuple(sample.values()),
            input_names=[*sample],
            output_names=[_OUTPUT],
            dynamic_shapes=(dynamic,),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    for node in program.model.graph:
        node.metadata_props.clear()  # stack traces with the paths of this machine
    n_bytes = sum(x.numel() * x.element_size() for x in model.parameters())
    program.save(file, external_data=n_bytes > _LARGEST)


@contextlib.contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Silence the logged warnings of a package."""
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_BITS = (2, 4, 8)
_BLOCKS = (128, 64, 32, 16)
_TABLE_BITS = 8
_ACTIVATIONS_IN_8_BITS = 4  # accuracy_level; float activations take three times as long


class IntegerLinear(nn.Module):
    """A linear layer with packed codes, to be exported: torch has no operator for it."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Array, scales: Array, bits: int, bias: Tensor | None) -> None:
        super().__init__()
        n_out, n_blocks = scales.shape
        self.register_buffer("codes", torch.from_numpy(pack(codes, bits, 1).reshape(n_out, n_blocks, -1)))
        self.register_buffer("scales", torch.from_numpy(scales.copy()))
        self.bits, self.block, self.bias = bits, codes.shape[1] // n_blocks, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ W^T + bias."""
        n_out, n_blocks = self.scales.shape
        product = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (x, self.codes, self.scales),
            {
                "K": n_blocks * self.block,
                "N": n_out,
                "bits": self.bits,
                "block_size": self.block,
                "accuracy_level": _ACTIVATIONS_IN_8_BITS,
            },
            dtype=x.dtype,
            shape=(*x.shape[:-1], n_out),
            version=1,
        )
        return product if self.bias is None else product + self.bias


class IntegerTable(nn.Module):
    """A table of embeddings in 8 bits, to be exported; its width is that of integer weights, a multiple of a block."""

    codes: Tensor
    scales: Tensor

    def __init__(self, table: Array) -> None:
        super().__init__()
        self.block = next(block for block in _BLOCKS if table.shape[1] % block == 0)
        rounded = round_to_nearest(table, IntegerFormat(_TABLE_BITS, 1, self.block, has_zero=True))
        self.register_buffer("codes", torch.from_numpy(rounded.unsigned()))
        self.register_buffer("scales", torch.from_numpy(rounded.scales))

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of these indices."""
        return torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (self.codes, indices, self.scales),
            {"bits": _TABLE_BITS, "block_size": self.block, "gather_axis": 0, "quantize_axis": 1},
            dtype=self.scales.dtype,
            shape=(*indices.shape, self.codes.shape[1]),
            version=1,
        )


def integer_weights(checkpoint: Checkpoint) -> dict[str, IntegerTensor]:
    """Return the weights that a folder stores as integers of an engine, by tensor name."""
    return {name: info for name, info in checkpoint.folder.tensors.items() if isinstance(info, IntegerTensor)}


def check_weights(weights: Mapping[str, IntegerTensor]) -> None:
    """Raise if onnxruntime has no operator for a width, a group or a zero of these weights."""
    advice = "compress with layout 'onnxruntime' (--layout onnxruntime)."
    for name, info in weights.items():
        (_, n_in), n_groups, zero = info.shape, info.n_groups, 2 ** (info.n_bits - 1)
        block = n_in // n_groups
        if info.n_bits not in _BITS or block not in _BLOCKS or block * n_groups != n_in:
            raise ArgumentError(
                f"export_onnx: weights in integers must have {', '.join(map(str, _BITS))} bits in groups of "
                f"{', '.join(map(str, _BLOCKS))} inputs for onnxruntime, got {name!r} of {info.n_bits} bits in groups "
                f"of {block}; {advice}"
            )
        if (info.groups() != np.arange(n_in) // block).any():
            raise ArgumentError(
                f"export_onnx: the groups of {name!r} must be of {block} consecutive inputs for onnxruntime, got "
                f"another order (desc_act); {advice}"
            )
        if (info.zeros() != zero).any():
            raise ArgumentError(f"export_onnx: the code of 0 must be {zero} in {name!r}, got others; {advice}")


def use_integers(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Replace the linear layers of integer weights, and the table of token embeddings, of a model in memory.

    The weights are those that `check_weights` admits.
    """
    for name, info in integer_weights(checkpoint).items():
        place, linear = find_place(model, name.removesuffix(".weight").removeprefix(checkpoint.prefix))
        bias: Any = linear.bias
        model.set_submodule(place, IntegerLinear(info.codes().astype(np.uint8), info.scales(), info.n_bits, bias))
    if checkpoint.wiring.reads == "tokens":
        table = checkpoint.wiring.embedding.table
        place, _ = find_place(model, table.module.removeprefix(checkpoint.prefix))
        model.set_submodule(place, IntegerTable(checkpoint.folder.tensors[table.weight].read_finite()))
    return model
