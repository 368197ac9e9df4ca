"""Attention of a model in memory, and of one head alone, against whole layers of its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_layers import ARRAYS, same_layer
from checkpoint_folders import CONFIG, change_tensors
from oracles import refused
from tnlib_adapters import Attention, open_checkpoint
from tnlib_adapters.attention.norms import LatentNorm

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError

pytest.importorskip("torch")
models = pytest.importorskip("architecture_models")

NAMES = sorted(models.MODELS)


@pytest.mark.parametrize("name", [*NAMES, "bert", "bert_masked", "gpt2", "gpt2_lm", "gpt2_by_layer"])
def test_a_model_in_memory_has_the_layers_of_its_folder(name: str, saved: Any) -> None:
    model, folder = saved(name)
    checkpoint = open_checkpoint(folder)
    for layer in range(checkpoint.n_layers):
        same_layer(Attention.from_module(model, layer), checkpoint.attention(layer))
    same_layer(Attention.from_module(model.base_model, -1), checkpoint.attention(-1))


def test_what_is_no_model_is_refused(saved: Any) -> None:
    import torch

    model = saved("llama")[0]
    for wrong in (np.ones(3), torch.nn.Linear(2, 2), None, "llama"):
        with refused(ArgumentTypeError, "Attention.from_module: model"):
            Attention.from_module(wrong, 0)
    with refused(ArgumentError, "Attention.from_module: layer", "between 0 and 1", "2"):
        Attention.from_module(model, 2)
    with refused(ArgumentTypeError, "Attention.from_module: layer"):
        Attention.from_module(model, 0.0)


def test_a_model_without_values_is_refused() -> None:
    import torch

    with torch.device("meta"):
        model = models.MODELS["llama"]()
    with refused(ArgumentError, "Attention.from_module", "layers.0.self_attn.q_proj.weight", "meta"):
        Attention.from_module(model, 0)


def test_a_model_that_was_taken_apart_is_refused() -> None:
    import torch

    model = models.MODELS["llama"]()
    model.model.layers[0].self_attn.k_proj = torch.nn.Linear(24, 13)
    with refused(ArgumentError, "layers.0.self_attn.k_proj.weight", "(12, 24)", "(13, 24)"):
        Attention.from_module(model, 0)
    model.model.layers[0].self_attn.k_proj = torch.nn.Identity()
    with refused(ArgumentError, "layers.0.self_attn.k_proj.weight", "(12, 24)", "none"):
        Attention.from_module(model, 0)
    model.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    with refused(ArgumentError, "layers.0.self_attn.q_proj.weight", "found 0"):
        Attention.from_module(model, 0)


def test_half_precision_and_gradients_do_not_matter() -> None:
    import torch

    model = models.MODELS["qwen2"]().to(torch.bfloat16)
    layer = Attention.from_module(model, 0)
    want = model.model.layers[0].self_attn.q_proj.weight.detach().float().numpy()
    assert layer.W_Q.dtype == np.float32
    np.testing.assert_array_equal(layer.W_Q[1], want[6:12].T)


# --------------------------------------------------------------------------------------------------- one head alone


@pytest.mark.parametrize("name", [*NAMES, "bert", "gpt2"])
def test_one_head_is_a_slice_of_its_layer(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    whole = checkpoint.attention(1)
    size = whole.n_heads // whole.kv_heads
    for head in range(whole.n_heads):
        one = checkpoint.head(1, head)
        assert (one.n_heads, one.kv_heads, one.b_O) == (1, 1, None)
        for array in ARRAYS[:-1]:
            mine, theirs = getattr(one, array), getattr(whole, array)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                np.testing.assert_array_equal(mine[0], theirs[head // size if array[-1] in "KV" else head])
        np.testing.assert_array_equal(one.numerator().qk(0, 3).full(), whole.numerator().qk(head, 3).full())
        np.testing.assert_array_equal(one.numerator().ov(0).full(), whole.numerator().ov(head).full())


def test_heads_that_do_not_exist_are_refused(saved: Any) -> None:
    checkpoint = open_checkpoint(saved("llama")[1])
    with refused(ArgumentError, "Checkpoint.head: head", "between 0 and 3", "4"):
        checkpoint.head(0, 4)
    with refused(ArgumentError, "Checkpoint.head: layer", "between 0 and 1", "2"):
        checkpoint.head(2, 0)
    with refused(ArgumentTypeError, "Checkpoint.head: head"):
        checkpoint.head(0, 1.0)  # type: ignore[arg-type]


def test_spoiled_and_shortened_heads_are_refused(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("llama")[1], tmp_path / "changed"))
    name = "model.layers.0.self_attn.q_proj.weight"

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][7, 3] = np.nan  # of head 1

    change_tensors(folder, spoil)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.head(0, 0).n_heads == 1
    with refused(FileFormatError, repr(name), "nan"):
        checkpoint.head(0, 1)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3000])
    last = max(checkpoint.folder.tensors.values(), key=lambda tensor: tensor.end)
    with refused(FileFormatError, repr(last.name), "cut short"):
        last.read_part((slice(None),))


def test_walking_all_heads_takes_less_memory_than_the_layer(tmp_path: Path) -> None:
    """A layer of the shape of a model of one billion, in bfloat16."""
    import tracemalloc

    from checkpoint_folders import safetensors_file

    d, heads, kv, width = 2048, 32, 8, 64
    sizes = {"q_proj": (d, d), "k_proj": (kv * width, d), "v_proj": (kv * width, d), "o_proj": (d, d)}
    zeros = {f"model.layers.0.self_attn.{name}.weight": ("BF16", np.ones(s, np.float32)) for name, s in sizes.items()}
    safetensors_file(tmp_path / "model.safetensors", {**zeros, "model.embed_tokens.weight": ("BF16", np.ones((2, d)))})
    config = {"model_type": "llama", "hidden_size": d, "num_attention_heads": heads, "num_hidden_layers": 1}
    (tmp_path / CONFIG).write_text(json.dumps({**config, "num_key_value_heads": kv, "max_position_embeddings": 99}))
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    for head in range(heads):
        one = checkpoint.head(0, head)
        assert (one.qk(0, 7).ranks, one.ov(0).ranks) == ((width,), (width,))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < sum(m * n for m, n in sizes.values())  # half of the bytes of the layer in the file


def test_latent_vectors_are_divided_by_the_root_of_their_mean_square_and_eps() -> None:
    """The eps is as large as the mean square here, so that a division without it would be 41 % off."""
    x = np.array([[0.1, -0.1, 0.1], [0.0, 0.0, 0.0]])
    norm = LatentNorm(query=2 * np.eye(3), key_value=np.eye(3), eps=0.01, n_rotated=1)
    assert np.allclose(norm.value_divisors(x)[:, 0], [np.sqrt(0.02), 0.1])
    assert np.allclose(norm.queries(np.ones((2, 4)), x)[:, 0], [1 / np.sqrt(0.05), 10.0])
