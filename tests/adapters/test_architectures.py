"""Every row of the table of architectures against the forward pass of transformers, layer by layer, head by head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import CONFIG, INDEX, change_config, change_tensors
from oracles import assert_close, refused
from tnlib_adapters import Attention, open_checkpoint
from tnlib_adapters.checkpoints.architectures import ARCHITECTURES

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError

pytest.importorskip("torch")
models = pytest.importorskip("architecture_models")

NAMES = sorted(models.MODELS)
ARRAYS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
Layers = list[tuple[Attention, Any]]


@pytest.fixture(params=NAMES)
def layers(request: pytest.FixtureRequest, saved: Any, recorded: Any) -> Layers:
    """Every layer of a saved model, beside scores, patterns, input and output of the running one for a sequence."""
    checkpoint, run = open_checkpoint(saved(request.param)[1]), recorded(request.param)
    per_layer = zip(run.scores, run.patterns, run.inputs, run.outputs, strict=True)
    return [(checkpoint.attention(i), [a[0] for a in of_layer]) for i, of_layer in enumerate(per_layer)]


def visible(scores: np.ndarray) -> np.ndarray:
    """Where a score is not masked: masks are the lowest finite number."""
    return scores > -1e30


def from_the_diagonal(layer: Attention, scores: np.ndarray) -> np.ndarray:
    """Scores of the model with ALiBi counted from the query: it counts from the first key, which shifts whole rows."""
    if layer.alibi is None:
        return scores
    return scores - layer.alibi[:, None, None] * np.arange(scores.shape[1])[:, None]


def homogeneous(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones_like(x[:, :1])], axis=1)


def test_every_row_has_a_model(saved: Any) -> None:
    covered = {saved(name)[0].config.model_type for name in (*NAMES, "bert", "gpt2")}
    assert covered == set(ARCHITECTURES) - {"tnlib_attention_only"}


def test_nothing_is_trivial(layers: Layers) -> None:
    assert len(layers) == 2
    for layer, _ in layers:
        for name in ARRAYS:
            value = getattr(layer, name)
            assert value is None or (value.dtype == np.float32 and np.abs(value).min() > 0)


def test_scores_are_those_of_the_model(layers: Layers) -> None:
    for layer, (scores, _, x, _) in layers:
        got, want = layer.scores(x), from_the_diagonal(layer, scores)
        for head in range(layer.n_heads):
            seen = visible(scores[head])
            np.testing.assert_array_equal(layer.mask(len(x)), seen)
            assert_close(got[head][seen], want[head][seen], np.float32, factor=64)


def test_patterns_are_those_of_the_model(layers: Layers) -> None:
    for layer, (scores, patterns, x, _) in layers:
        weights = np.exp(layer.scores(x).astype(np.float64)) * layer.mask(len(x))
        # exp turns the roundoff of a score, absolute, into a relative error
        factor = 64 * max(1.0, np.abs(scores[visible(scores)]).max())
        for head in range(layer.n_heads):
            of_head = weights[head] / weights[head].sum(-1, keepdims=True)
            assert_close(of_head, patterns[head], np.float32, factor)


def test_forms_at_every_distance_give_the_scores(layers: Layers) -> None:
    for layer, (scores, _, x, _) in layers:
        bilinear, x1, n = layer.numerator(), homogeneous(x).astype(np.float64), len(x)
        positions = np.arange(n)
        distance = positions[:, None] - positions
        want = from_the_diagonal(layer, scores)
        for head in range(layer.n_heads):
            got = np.zeros((n, n))
            for far in np.unique(distance):
                form = layer.scale * x1 @ bilinear.qk(head, int(far)).full() @ x1.T
                got = np.where(distance == far, form, got)
            if layer.head_norm is not None:
                got = got / norms(layer, x1, head)
            if layer.softcap is not None:
                got = layer.softcap * np.tanh(got / layer.softcap)
            seen = visible(scores[head])
            assert_close(got[seen], want[head][seen], np.float32, factor=256)


def norms(layer: Attention, x1: np.ndarray, head: int) -> np.ndarray:
    """Root mean squares of every query times those of every key, (n, n)."""
    assert layer.head_norm is not None
    kv_head = head // (layer.n_heads // layer.kv_heads)
    sizes = []
    for weight, bias, which in ((layer.W_Q, layer.b_Q, head), (layer.W_K, layer.b_K, kv_head)):
        columns = x1[:, :-1] @ weight[which] + (0 if bias is None else bias[which])
        sizes.append(np.sqrt((columns**2).mean(-1) + layer.head_norm.eps))
    return np.outer(*sizes)


def test_value_forms_give_the_outputs(layers: Layers) -> None:
    for layer, (_, patterns, x, outputs) in layers:
        x1 = homogeneous(x).astype(np.float64)
        written = sum(patterns[h] @ (x1 @ layer.ov(h)) for h in range(layer.n_heads))
        assert not written[:, -1].any()
        assert_close(written[:, :-1] + (0 if layer.b_O is None else layer.b_O), outputs, np.float32, factor=64)


def test_frozen_gives_the_outputs_under_the_models_own_patterns(layers: Layers) -> None:
    for layer, (_, patterns, x, outputs) in layers:
        assert_close(layer.frozen(patterns).apply(x), outputs, np.float32, factor=64)


def test_tensors_over_distances_hold_the_forms(layers: Layers) -> None:
    layer = layers[0][0].numerator()
    d, dh, far = layer.d_model, layer.d_head, np.arange(-3, 12)
    turning = 0 if layer.rotary is None else layer.rotary.n_columns
    for head in range(layer.n_heads):
        tensor = layer.qk_tensor(head, far)
        assert tensor.shape == (len(far), d + 1, d + 1)
        sloped = layer.alibi is not None
        waves = turning + (turning < dh) if turning else 1 + sloped
        assert tensor.ranks == (waves, dh + sloped, dh + sloped)
        dense = tensor.full()
        for k, distance in enumerate(far):
            assert_close(dense[k], layer.qk(head, int(distance)).full(), np.float32, factor=16)


def test_operators_stay_factors(layers: Layers) -> None:
    layer = layers[0][0].numerator()
    d, dh = layer.d_model + 1, layer.d_head
    rank = dh + (layer.alibi is not None)
    assert [a.shape for a in layer.qk(0, 1).arrays()] == [(d, rank), (rank, d)]
    assert [a.shape for a in layer.ov(0).arrays()] == [(d, dh), (dh, d)]


def test_groups_hold_the_forms_of_their_heads(layers: Layers) -> None:
    layer = layers[1][0].numerator()
    d, size = layer.d_model + 1, layer.n_heads // layer.kv_heads
    for kv_head in range(layer.kv_heads):
        queries, values = layer.qk_group(kv_head, 2), layer.ov_group(kv_head)
        assert (queries.shape, values.shape) == ((size * d, d), (d, size * d))
        assert values.ranks == (layer.d_head,)
        assert queries.ranks == (layer.d_head + (layer.alibi is not None),)
        for k, head in enumerate(range(kv_head * size, (kv_head + 1) * size)):
            mine = slice(k * d, (k + 1) * d)
            np.testing.assert_allclose(queries.full()[mine], layer.qk(head, 2).full(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(values.full()[:, mine], layer.ov(head).full(), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------- a model in memory


def same_layer(one: Attention, other: Attention) -> None:
    for name in (*ARRAYS, "alibi"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs)
    facts = ("scale", "softcap", "causal", "window", "context")
    assert [getattr(one, f) for f in facts] == [getattr(other, f) for f in facts]
    if one.rotary is not None and other.rotary is not None:
        np.testing.assert_array_equal(one.rotary.frequencies, other.rotary.frequencies)
        assert (one.rotary.pairs, one.rotary.factor) == (other.rotary.pairs, other.rotary.factor)
    assert (one.rotary is None) == (other.rotary is None)
    if one.head_norm is not None and other.head_norm is not None:
        np.testing.assert_array_equal(one.head_norm.query, other.head_norm.query)
        np.testing.assert_array_equal(one.head_norm.key, other.head_norm.key)
    assert (one.head_norm is None) == (other.head_norm is None)


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


# ------------------------------------------------------------------------------------------------ folders of all ages


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "falcon_new", "gemma2", "vit"])
@pytest.mark.parametrize(("dtype", "sharded"), [("bfloat16", False), ("bfloat16", True), ("float32", True)])
def test_half_precision_and_shards_are_read(name: str, dtype: str, sharded: bool, tmp_path: Path) -> None:
    import torch
    from transformers_models import random_model

    model = random_model(name).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="5KB" if sharded else "1GB")
    assert (tmp_path / INDEX).exists() == sharded
    checkpoint = open_checkpoint(tmp_path)
    for layer in range(checkpoint.n_layers):
        same_layer(checkpoint.attention(layer), Attention.from_module(model, layer))


# What transformers 4 wrote in the place of rope_parameters.
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rope_scaling": None},
    "llama_linear": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama_yarn": {"rope_theta": 100.0, "rope_scaling": {"rope_type": "yarn", **models.YARN}},
    "llama_3": {
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_neox": {"rotary_emb_base": 100, "rotary_pct": 0.5},
    "gpt_neox_sequential": {},
    "phi": {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "phi3_longrope": {
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0]},
    },
    "falcon": {},
    "gemma": {"rope_theta": 10000.0},
    "qwen2_window": {"rope_theta": 10000.0, "layer_types": ...},
    "qwen3": {"rope_theta": 10000.0, "layer_types": ...},
    "bloom": {"n_head": ..., "num_attention_heads": 4, "hidden_size": ..., "n_embed": 24},
}


@pytest.mark.parametrize("name", sorted(OLDER))
def test_names_of_older_configs_are_read(name: str, saved: Any, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(saved(name)[1], tmp_path / "older"))
    change_config(folder, rope_parameters=..., head_dim=open_checkpoint(folder).sizes.d_head, **OLDER[name])
    assert "rope_parameters" not in json.loads((folder / CONFIG).read_text())
    same_layer(open_checkpoint(folder).attention(1), open_checkpoint(saved(name)[1]).attention(1))


# -------------------------------------------------------------------------------------------------- long sequences


@pytest.mark.parametrize(("name", "length"), [("llama_dynamic", 41), ("phi3_longrope", 25), ("llama_yarn", 30)])
def test_frequencies_that_depend_on_the_length(name: str, length: int, saved: Any) -> None:
    from transformers_models import inputs, random_model, record

    run = record(random_model(name), inputs(saved(name)[0], length))  # a new one: it keeps the longest it has seen
    checkpoint = open_checkpoint(saved(name)[1])
    for i in range(checkpoint.n_layers):
        layer, x, want = checkpoint.attention(i, length=length), run.inputs[i][0], run.scores[i][0]
        assert_close(layer.scores(x)[visible(want)], want[visible(want)], np.float32, factor=256)
        if "yarn" not in name:  # whose frequencies are the same at every length
            with refused(ArgumentError, "Attention.scores: x", "at most"):
                checkpoint.attention(i).scores(x)
            assert not np.allclose(layer.qk(0, 5).full(), checkpoint.attention(i).qk(0, 5).full())


def test_lengths_beyond_the_context_are_refused(saved: Any) -> None:
    for name in ("llama", "phi3_longrope", "llama_yarn"):
        with refused(ArgumentError, "Checkpoint.attention: length", "32", "33"):
            open_checkpoint(saved(name)[1]).attention(0, length=33)


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_distance_is_asked_for_where_scores_depend_on_it(layers: Layers) -> None:
    layer = layers[0][0].numerator()
    if layer.rotary is None and layer.alibi is None:
        np.testing.assert_array_equal(layer.qk(0).full(), layer.qk(0, 5).full())
        with refused(ArgumentError, "Attention.qk: plane", "rotary"):
            layer.qk(0, 0, plane=0)
        return
    with refused(ArgumentError, "Attention.qk: distance must be given", "rotary" if layer.rotary else "ALiBi"):
        layer.qk(0)
    if layer.alibi is not None:
        with refused(ArgumentError, "Attention.qk_tensor: plane", "rotary"):
            layer.qk_tensor(0, [1], plane=0)


def test_distances_outside_the_context_are_refused(saved: Any) -> None:
    layer = open_checkpoint(saved("llama")[1]).attention(0)
    assert layer.qk(0, 31).shape == layer.qk(0, -31).shape
    for far in (32, -32):
        with refused(ArgumentError, "Attention.qk: distance", "32 positions", str(far)):
            layer.qk(0, far)
        with refused(ArgumentError, "Attention.qk_tensor: distances", "32 positions", str(far)):
            layer.qk_tensor(0, [0, far, 1])
    for wrong in (0.5, "1", True):
        with refused(ArgumentTypeError, "Attention.qk: distance"):
            layer.qk(0, wrong)  # type: ignore[arg-type]
    for wrong in ([], [0.5], [[1]], 3):
        with refused(ArgumentTypeError, "Attention.qk_tensor: distances"):
            layer.qk_tensor(0, wrong)
    with refused(ArgumentError, "Attention.qk: plane", "between 0 and 2", "3"):
        layer.qk(0, 1, plane=3)
    with refused(ArgumentError, "Attention.qk_group: kv_head", "between 0 and 1", "2"):
        layer.qk_group(2, 1)
    with refused(ArgumentError, "Attention.ov_group: kv_head", "between 0 and 1", "-3"):
        layer.ov_group(-3)


def test_forms_of_normalised_heads_are_refused(saved: Any) -> None:
    layer = open_checkpoint(saved("qwen3")[1]).attention(0)
    for call in (lambda: layer.qk(0, 1), lambda: layer.qk_tensor(0, [1]), lambda: layer.qk_group(0, 1)):
        with refused(ArgumentError, "no bilinear form", "normalised", "numerator()"):
            call()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "mrope"}}, ("rope_type", "llama3", "yarn", "'mrope'")),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ("'full_attention'", "all layers")),
        ("llama", {"rope_parameters": ["x"]}, ("rope_type", "['x']")),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, ("factor", "'x'")),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ("low_freq_factor", "None")),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, ("short_factor", "3 numbers")),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ("even number", "got 3")),
        ("gptj", {"rotary_dim": None}, ("even number of at most 8", "got None")),
        ("gptj", {"rotary_dim": 10}, ("even number of at most 8", "got 10")),
        ("llama", {"num_key_value_heads": 3}, ("multiple of the count of key and value heads", "4 and 3")),
        ("llama", {"num_key_value_heads": 0}, ("key and value heads", "positive", "got 0")),
        ("llama", {"num_key_value_heads": 4}, ("layers.0.self_attn.k_proj.weight", "(24, 24)", "(12, 24)")),
        ("llama", {"head_dim": 8}, ("layers.0.self_attn.q_proj.weight", "(32, 24)", "(24, 24)")),
        ("qwen3", {"head_dim": "x"}, ("head_dim", "'x'")),
        ("phi", {"qk_layernorm": True}, ("qk_layernorm", "True")),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, ("apply_residual", "True")),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    name: str, values: dict[str, Any], words: tuple[str, ...], saved: Any, tmp_path: Path
) -> None:
    import shutil

    folder = Path(shutil.copytree(saved(name)[1], tmp_path / "changed"))
    change_config(folder, **values)
    with refused(FileFormatError, "open_checkpoint: ", *words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
        ("bloom", "transformer.h.0.self_attention.dense.weight"),
    ],
)
def test_missing_tensors_are_named(name: str, tensor: str, saved: Any, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(saved(name)[1], tmp_path / "changed"))
    change_tensors(folder, lambda tensors: tensors.pop(tensor))
    with refused(FileFormatError, "open_checkpoint: ", repr(tensor), "missing"):
        open_checkpoint(folder)


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
        np.testing.assert_array_equal(one.ov(0).full(), whole.ov(head).full())


def test_heads_that_do_not_exist_are_refused(saved: Any) -> None:
    checkpoint = open_checkpoint(saved("llama")[1])
    with refused(ArgumentError, "Checkpoint.head: head", "between 0 and 3", "4"):
        checkpoint.head(0, 4)
    with refused(ArgumentError, "Checkpoint.head: layer", "between 0 and 1", "2"):
        checkpoint.head(2, 0)
    with refused(ArgumentTypeError, "Checkpoint.head: head"):
        checkpoint.head(0, 1.0)  # type: ignore[arg-type]


def test_spoiled_and_shortened_heads_are_refused(saved: Any, tmp_path: Path) -> None:
    import shutil

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
    import tracemalloc

    from random_checkpoints import tensor_file

    d, heads, kv = 1024, 16, 4
    sizes = {"q_proj": (d, d), "k_proj": (kv * 64, d), "v_proj": (kv * 64, d), "o_proj": (d, d)}
    zeros = {f"model.layers.0.self_attn.{name}.weight": ("BF16", np.ones(s, np.float32)) for name, s in sizes.items()}
    tensor_file(tmp_path / "model.safetensors", {**zeros, "model.embed_tokens.weight": ("BF16", np.ones((2, d)))})
    config = {"model_type": "llama", "hidden_size": d, "num_attention_heads": heads, "num_hidden_layers": 1}
    (tmp_path / CONFIG).write_text(json.dumps({**config, "num_key_value_heads": kv, "max_position_embeddings": 99}))
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    for head in range(heads):
        one = checkpoint.head(0, head)
        assert (one.qk(0, 7).ranks, one.ov(0).ranks) == ((64,), (64,))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * sum(m * n for m, n in sizes.values())  # bytes of the layer in the file


# ------------------------------------------------------------------------------------------------ learned positions


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "roberta", "vit"])
def test_content_and_positions_add_up_to_the_scores(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    layer, positions = checkpoint.attention(0), checkpoint.positions()[:9].astype(np.float64)
    assert len(positions) == 9
    content = np.random.default_rng(0).standard_normal(positions.shape)
    c = homogeneous(content)
    for head in range(layer.n_heads):
        parts = layer.qk_positions(head, positions)
        assert (parts.by_key.shape, parts.by_query.shape) == ((layer.d_model + 1, 9), (9, layer.d_model + 1))
        assert parts.alone.ranks == parts.by_key.ranks == parts.by_query.ranks == (layer.d_head,)
        got = c @ parts.content.full() @ c.T + c @ parts.by_key.full() + parts.by_query.full() @ c.T
        want = layer.scores(content + positions)[head]
        assert_close(layer.scale * (got + parts.alone.full()), want, np.float32)


def test_positions_are_those_the_model_adds(saved: Any) -> None:
    import torch

    for name, module in (("gpt2", "wpe"), ("opt", "decoder.embed_positions"), ("roberta", "embeddings")):
        model, folder = saved(name)
        got, base = open_checkpoint(folder).positions(), model.base_model.get_submodule(module)
        ids = torch.arange(2, 8)[None]
        with torch.no_grad():
            if name == "roberta":  # everything but the position is the same in a sequence of one token repeated
                x = base(torch.full((1, 6), 7))[0].numpy()
                rest = base.word_embeddings.weight[7] + base.token_type_embeddings.weight[0]
                want = base.LayerNorm(rest + torch.from_numpy(got[:6])).numpy()
            else:
                x, want = base(torch.ones_like(ids) if name == "opt" else torch.arange(6)[None])[0].numpy(), got[:6]
        assert_close(x, want, np.float32)


def test_positions_that_are_not_learned_are_refused(saved: Any) -> None:
    for name, word in (("llama", "rotary"), ("bloom", "ALiBi")):
        checkpoint = open_checkpoint(saved(name)[1])
        with refused(ArgumentError, "Checkpoint.positions", checkpoint.architecture.model_type, "distance"):
            checkpoint.positions()
        with refused(ArgumentError, "Attention.qk_positions", word):
            checkpoint.attention(0).qk_positions(0, np.ones((3, 24)))
    with refused(ArgumentError, "Attention.qk_positions: positions", "(3, 25)"):
        open_checkpoint(saved("opt")[1]).attention(0).qk_positions(0, np.ones((3, 25)))


def test_null_is_an_answer_where_a_missing_key_is_none(saved: Any, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(saved("gemma2")[1], tmp_path / "changed"))
    keys = ("attn_logit_softcapping", "query_pre_attn_scalar", "layer_types", "sliding_window")
    change_config(folder, **dict.fromkeys(keys, ...))
    layer = open_checkpoint(folder).attention(0)
    assert (layer.softcap, layer.scale, layer.window) == (50.0, 1 / 16, 4096)
    assert open_checkpoint(folder).attention(1).window is None
    change_config(folder, attn_logit_softcapping=None)
    assert open_checkpoint(folder).attention(0).softcap is None

    folder = Path(shutil.copytree(saved("mistral_whole")[1], tmp_path / "mistral"))
    assert open_checkpoint(folder).attention(0).window is None
    change_config(folder, sliding_window=...)
    assert open_checkpoint(folder).attention(0).window == 4096


# ------------------------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize("name", ["opt", "opt_after", "roberta"])
def test_what_has_learned_positions_is_compressed_and_reloaded(
    name: str, saved: Any, recorded: Any, tmp_path: Path, without_pictures: None
) -> None:
    pytest.importorskip("tnlib_adapters.torch")
    from tnlib_adapters import compress
    from transformers_models import record

    model, folder = saved(name)
    compress(folder, tmp_path / "out", keep=1.0)
    loaded = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    want, got = recorded(name), record(loaded, recorded(name).tokens)
    assert_close(got.hidden, want.hidden, np.float32, factor=256)


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox", "bloom", "falcon_alibi", "vit"])
def test_what_cannot_be_compressed_yet_is_said(name: str, saved: Any, tmp_path: Path) -> None:
    from tnlib_adapters import compare, compress

    model, folder = saved(name)
    with refused(ArgumentError, "compress", model.config.model_type, "cannot be compressed yet"):
        compress(folder, tmp_path / "out", keep=0.5)
    assert not (tmp_path / "out").exists()
    with refused(ArgumentError, "compress", model.config.model_type, "cannot be compressed yet"):
        compare(open_checkpoint(folder), keeps=[0.5])


# -------------------------------------------------------------------------------------------------------- the page


def test_the_page_shows_every_model_and_every_cell_is_green() -> None:
    import architecture_table as table
    from transformers_models import MODELS

    text = table.PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    header, _, *models_shown = rows
    assert header[-len(table.MEASURES) :] == list(table.MEASURES)
    assert [row[0] for row in models_shown] == sorted(MODELS)
    for row in models_shown:
        for cell in row[-len(table.MEASURES) :]:
            assert cell in ("equal", "not bilinear") or float(cell) < table.GREEN, row


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "falcon_alibi", "vit"])
def test_the_page_is_what_is_measured(name: str, tmp_path: Path) -> None:
    import architecture_table as table

    text = table.page({name: table.make_case(name, tmp_path)})
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    described = line.split("|")[:5]
    assert any(shown.split("|")[:5] == described for shown in table.PAGE.read_text(encoding="utf-8").splitlines())
    assert "**" not in line  # nothing misses


def test_what_a_layer_has_is_said_in_a_line(saved: Any) -> None:
    said = {name: repr(open_checkpoint(saved(name)[1]).attention(0)) for name in ("qwen3", "bloom", "gemma2", "opt")}
    assert said["qwen3"].startswith(
        "Attention(4 heads of 10 on 2 key and value heads, d_model 24, scale 0.3162, rotary"
    )
    assert "normalised queries and keys" in said["qwen3"]
    assert said["bloom"].endswith(", ALiBi)")
    assert said["gemma2"].endswith(", rotary, soft cap, window)")
    assert said["opt"].endswith("scale 0.4082)")
    assert "2 layers, 4 heads of 10 on 2 key and value heads, d_model 24" in repr(open_checkpoint(saved("qwen3")[1]))
