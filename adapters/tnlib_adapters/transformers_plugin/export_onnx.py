"""Export encoders to ONNX folders that sentence-transformers and onnxruntime load."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tnlib import ArgumentError
from tnlib._validate import import_optional
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.files.folder import open_folder, other_files
from tnlib_adapters.transformers_plugin.linear_layers import use_linear_layers

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OPSET = 18


def export_onnx(folder: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write an encoder as OUT/onnx/model.onnx, beside config, tokenizer and pooling of its folder.

    The graph has the outputs `last_hidden_state` and, as inputs, those of `INPUTS` that the tokenizer returns, with any
    numbers of texts and tokens. Factored layers are those of `use_linear_layers`; numbers are float32.

    Parameters
    ----------
    folder
        Folder of an encoder, factored or not.
    out
        New folder, which appears whole or not at all.
    force
        Replace a folder with files in it.

    Raises
    ------
    ArgumentError
        If the model is no encoder, or `out` cannot be made.
    """
    import_optional(__name__, "onnxscript", "onnx onnxscript")
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    source, target = open_folder(folder), Path(out)
    check_target("export_onnx", target, source.path, force=force)
    config = AutoConfig.from_pretrained(source.path)
    if getattr(config, "is_decoder", False) or config.is_encoder_decoder or not hasattr(config, "type_vocab_size"):
        raise ArgumentError(
            f"export_onnx: folder must hold an encoder such as BERT, got a {config.model_type}; export decoders by "
            "optimum from a dense folder."
        )
    names = AutoTokenizer.from_pretrained(source.path).model_input_names
    model = use_linear_layers(AutoModel.from_pretrained(source.path, dtype=torch.float32).eval())
    with whole_folder(target) as partial:
        (partial / "onnx").mkdir()
        _write_graph(model, [name for name in INPUTS if name in names], partial / "onnx" / "model.onnx")
        config.__dict__.pop("quantization_config", None)
        config.save_pretrained(partial)
        for path in other_files(source, skip=("tnlib_report.json", "tnlib_report.html"))[0]:
            copy = partial / path.relative_to(source.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


class _HiddenStates(nn.Module):
    """The last hidden states of an encoder from inputs in a given order."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the hidden states, (texts, tokens, width)."""
        hidden: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        return hidden


def _write_graph(model: nn.Module, names: list[str], file: Path) -> None:
    sample = {name: torch.zeros(2, 8, dtype=torch.long) for name in names}
    sample["attention_mask"] += 1
    axes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter's own parts
        torch.onnx.export(
            _HiddenStates(model, names).eval(),
            tuple(sample.values()),
            file,
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_shapes=(tuple(axes for _ in names),),
            opset_version=_OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
