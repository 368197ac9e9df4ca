"""GGUF files of Llama models in integers of 2 to 8 bits, which llama.cpp and transformers read.

Matrices are rows of blocks (`factors.gguf_blocks`). llama.cpp rotates adjacent columns of a head, transformers its two
halves: rows of queries and keys are reordered.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib_adapters.architectures.geometric_frequencies import base_and_factor
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.gguf_blocks import BlockTensor
from tnlib_adapters.files.folder import CONFIG, INDEX
from tnlib_adapters.files.safetensors_file import TensorInfo
from tnlib_adapters.files.tokenizer import load_tokenizer

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_PRE_TOKENIZERS = {  # names of llama.cpp -> entries of tokenizer.json that it stands for
    "gpt-2": [_BYTE_LEVEL | {"use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL | {"use_regex": True}],
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens


@dataclass(frozen=True)
class BytePairTokenizer:
    """Byte-level BPE tokenizer as GGUF describes it: pieces with their types by token number, and merges."""

    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    tokenizer: Any  # of transformers


def check_gguf(checkpoint: Checkpoint) -> None:
    """Raise if a model or its tokenizer cannot be written as a GGUF file of architecture llama."""
    import_optional("compress: layout 'gguf'", "gguf", "'tnlib[gguf]'")
    wiring = checkpoint.wiring
    if wiring.model_type != "llama" or any(m.activation != "silu" for m in wiring.layers[0].feed_forward_layers):
        raise _refused("a Llama", f"a {wiring.model_type}")
    unknown = next((name for name, known in gguf_names(checkpoint).items() if known is None), None)
    if unknown is not None:
        raise _refused("a Llama without biases", f"tensor {unknown!r}")
    if _base(checkpoint) is None:
        raise _refused("rotary embeddings that are not scaled", "scaled ones")
    read_tokenizer(checkpoint)


def gguf_names(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Return the names of all tensors in GGUF, None for unknown ones; rotary frequencies have none there."""
    import gguf

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, checkpoint.n_layers)
    stored = (name for name in checkpoint.folder.tensors if not name.endswith(".inv_freq"))
    return {name: known.get_name(name, try_suffixes=(".weight",)) for name in stored}


def read_tokenizer(checkpoint: Checkpoint) -> BytePairTokenizer:
    """Return the tokenizer of a folder, or raise if llama.cpp has none like it."""
    tokenizer = load_tokenizer("compress", checkpoint.folder.path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = {} if backend is None else json.loads(backend.to_str())
    model, pre = content.get("model", {}), _pre_tokenizer(content.get("pre_tokenizer"))
    special = any(model.get(key) for key in ("byte_fallback", "ignore_merges", "continuing_subword_prefix"))
    if model.get("type") != "BPE" or pre is None or special or content["normalizer"]:
        raise _refused(
            f"a byte-level BPE tokenizer that splits text as {' or '.join(_PRE_TOKENIZERS)}",
            f"model {model.get('type')} with pre_tokenizer {json.dumps(content.get('pre_tokenizer')):.200}",
        )
    pieces = [(number, piece, _NORMAL) for piece, number in model["vocab"].items()]
    for added in content["added_tokens"]:
        pieces.append((added["id"], added["content"], _CONTROL if added["special"] else _USER_DEFINED))
    n_tokens, last = checkpoint.folder.tensors[checkpoint.wiring.embedding.table.weight].shape[0], max(pieces)[0]
    if last >= n_tokens:
        raise _refused(f"a tokenizer of at most {n_tokens} tokens, the rows of the embeddings", f"token {last}")
    tokens, types = [f"[PAD{k}]" for k in range(n_tokens)], [_UNUSED] * n_tokens
    for number, piece, kind in pieces:
        tokens[number], types[number] = piece, kind
    return BytePairTokenizer(pre, tokens, types, [" ".join(merge) for merge in model["merges"]], tokenizer)


def write_gguf(checkpoint: Checkpoint, file: Path) -> None:
    """Write a checkpoint that `check_gguf` admits, and its tokenizer, as one GGUF file; blocks are copied."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    _add_sizes(writer, checkpoint)
    _add_tokenizer(writer, read_tokenizer(checkpoint))
    tensors = [(new, checkpoint.folder.tensors[name]) for name, new in gguf_names(checkpoint).items() if new]
    for name, info in tensors:
        kind = gguf.GGMLQuantizationType[_type(info)]
        n_numbers, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*info.shape[:-1], info.shape[-1] // n_numbers * n_bytes)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, info in tensors:
        writer.write_tensor_data(_stored(checkpoint, info))
    writer.close()


def to_gguf(checkpoint: Checkpoint, file: Path) -> None:
    """Replace the weights in the folder of a checkpoint by one file, see `write_gguf`."""
    write_gguf(checkpoint, file)
    folder = checkpoint.folder
    for path in (*folder.files, folder.path / INDEX):
        path.unlink(missing_ok=True)
    (folder.path / CONFIG).write_text(json.dumps(dict(folder.config), indent=2) + "\n", encoding="utf-8")


def _add_sizes(writer: Any, checkpoint: Checkpoint) -> None:
    wiring, sizes = checkpoint.wiring, checkpoint.sizes
    writer.add_quantization_version(2)
    writer.add_context_length(wiring.context)
    writer.add_embedding_length(sizes.d_model)
    writer.add_block_count(sizes.n_layers)
    writer.add_feed_forward_length(checkpoint.folder.tensors[wiring.layers[0].feed_forward_matrices[0].weight].shape[0])
    writer.add_head_count(sizes.n_heads)
    writer.add_head_count_kv(sizes.kv_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(sizes.d_head)
    writer.add_rope_freq_base(_base(checkpoint))
    norm = wiring.layers[0].attention.norm
    writer.add_layer_norm_rms_eps(None if norm is None else norm.required_eps("compress"))


def _base(checkpoint: Checkpoint) -> float | None:
    """Return the base of rotary frequencies; None where they are scaled, which transformers does not read in GGUF."""
    base, factor = base_and_factor(checkpoint.wiring.layers[0].attention) or (None, None)
    return base if factor == 1 else None


def _add_tokenizer(writer: Any, tokenizer: BytePairTokenizer) -> None:
    loaded = tokenizer.tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre_tokenizer)
    writer.add_vocab_size(len(tokenizer.tokens))
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    for add, number in (
        (writer.add_bos_token_id, loaded.bos_token_id),
        (writer.add_eos_token_id, loaded.eos_token_id),
        (writer.add_pad_token_id, loaded.pad_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(loaded.bos_token_id in loaded("")["input_ids"])
    if isinstance(loaded.chat_template, str):
        writer.add_chat_template(loaded.chat_template)


def _type(info: TensorInfo) -> str:
    """Return the type of a tensor in GGUF; vectors are float32."""
    if isinstance(info, BlockTensor):
        return info.kind
    return info.dtype if len(info.shape) > 1 and info.dtype != "F64" else "F32"


def _stored(checkpoint: Checkpoint, info: TensorInfo) -> Array:
    """Return the bytes of a tensor."""
    rows: Any = slice(None)
    heads = {"q_proj": checkpoint.sizes.n_heads, "k_proj": checkpoint.sizes.kv_heads}.get(info.name.split(".")[-2])
    if heads is not None:
        rows = np.arange(info.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    if isinstance(info, BlockTensor):
        stored: Array = info.blocks.read()[rows]
        return stored
    values = info.read()[rows].astype(np.float32) if _type(info) == "F32" else info.read_stored()[rows]
    return np.ascontiguousarray(values).view(np.uint8)


def _pre_tokenizer(content: Any) -> str | None:
    """Return the name of llama.cpp for an entry of tokenizer.json."""
    steps = (content or {}).get("pretokenizers", [content])
    for name, wanted in _PRE_TOKENIZERS.items():
        if len(steps) == len(wanted) and all(step | needed == step for step, needed in zip(steps, wanted, strict=True)):
            return name
    return None


def _refused(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"compress: layout 'gguf' needs {expected}, got {got}; pass layout 'compressed-tensors' or 'factored'."
    )
