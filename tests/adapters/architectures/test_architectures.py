"""Every row of the table of architectures against the forward pass of transformers, layer by layer, head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_layers import ARRAYS, from_the_diagonal, homogeneous, mask_of, scores_of, visible
from oracles import assert_close, refused
from slow_cases import mostly_slow
from tnlib_adapters import Attention, open_checkpoint
from tnlib_adapters.architectures.table import ARCHITECTURES

from tnlib import ArgumentError, ArgumentTypeError

pytest.importorskip("torch")
models = pytest.importorskip("transformers_models")

NAMES = [*sorted(models.MODELS), "minilm"]
Layers = list[tuple[Attention, Any]]


@pytest.fixture(params=mostly_slow(NAMES, NAMES[::2]))
def layers(request: pytest.FixtureRequest, saved: Any, recorded: Any) -> Layers:
    """Every layer of a saved model, beside what the running one computes for a sequence.

    These are scores, patterns, the inputs of queries and of keys and values, and outputs.
    """
    checkpoint, run = open_checkpoint(saved(request.param)[1]), recorded(request.param)
    per_layer = zip(run.scores, run.patterns, run.inputs, run.read, run.outputs, strict=True)
    return [(checkpoint.attention(i), [a[0] for a in of_layer]) for i, of_layer in enumerate(per_layer)]


def test_every_row_has_a_model(saved: Any) -> None:
    covered = {saved(name)[0].config.model_type for name in NAMES}
    assert covered == set(ARCHITECTURES) - {"tnlib_attention_only"}


def test_nothing_is_trivial(layers: Layers) -> None:
    assert len(layers) >= 2
    for layer, _ in layers:
        for name in ARRAYS:
            value = getattr(layer, name)
            assert value is None or (value.dtype == np.float32 and np.abs(value).min() > 0)


def test_scores_are_those_of_the_model(layers: Layers) -> None:
    for layer, (scores, _, x, read, _) in layers:
        got, want = scores_of(layer, x, read), from_the_diagonal(layer, scores)
        for head in range(layer.n_heads):
            seen = visible(scores[head])
            np.testing.assert_array_equal(mask_of(layer, x, read), seen)
            assert_close(got[head][seen], want[head][seen], np.float32, factor=64)


def test_forms_at_every_distance_give_the_scores(layers: Layers) -> None:
    for layer, (scores, _, x, read, _) in layers:
        bilinear, (x1, read1) = layer.numerator(), (homogeneous(a).astype(np.float64) for a in (x, read))
        distance = np.arange(len(x))[:, None] - np.arange(len(read))
        want = from_the_diagonal(layer, scores)
        for head in range(layer.n_heads):
            got = np.zeros(distance.shape)
            for far in np.unique(distance):
                form = layer.scale * undivided(layer, bilinear.qk(head, int(far)), head, int(far), x1, read1)
                got = np.where(distance == far, form, got)
            if layer.head_norm is not None:
                got = got / norms(layer, x1, head)
            if layer.softcap is not None:
                got = layer.softcap * np.tanh(got / layer.softcap)
            seen = visible(scores[head])
            assert_close(got[seen], want[head][seen], np.float32, factor=256)


def undivided(layer: Attention, form: Any, head: int, far: int, x1: np.ndarray, read1: np.ndarray) -> np.ndarray:
    """Values of a form, with the divisions by latent vectors put back: rotated columns of keys have none."""
    values: np.ndarray = x1 @ form.full() @ read1.T
    if layer.latent_norm is None:
        return values
    assert layer.rotary is not None
    planes = (layer.numerator().qk(head, far, plane=f).full() for f in range(len(layer.rotary.frequencies)))
    rotated, x = sum(x1 @ plane @ x1.T for plane in planes), x1[:, :-1]
    divided = rotated + (values - rotated) / root_mean_square(layer, x, "key_value")
    return divided / root_mean_square(layer, x, "query")[:, None]


def root_mean_square(layer: Attention, x: np.ndarray, of: str) -> np.ndarray:
    """Root mean squares (n,) of the latent vectors of positions, 1 where there are none."""
    assert layer.latent_norm is not None
    down = getattr(layer.latent_norm, of)
    return np.ones(len(x)) if down is None else np.sqrt(((x @ down) ** 2).mean(-1) + layer.latent_norm.eps)


def norms(layer: Attention, x1: np.ndarray, head: int) -> np.ndarray:
    """Root mean squares of every query times those of every key, (n, n)."""
    assert layer.head_norm is not None
    kv_head = layer.kv_head(head)
    sizes = []
    for weight, bias, which in ((layer.W_Q, layer.b_Q, head), (layer.W_K, layer.b_K, kv_head)):
        columns = x1[:, :-1] @ weight[which] + (0 if bias is None else bias[which])
        sizes.append(np.sqrt((columns**2).mean(-1) + layer.head_norm.eps))
    return np.outer(*sizes)


def test_value_forms_give_the_outputs(layers: Layers) -> None:
    for layer, (_, patterns, _, x, outputs) in layers:
        x1, bilinear = homogeneous(x).astype(np.float64), layer.numerator()
        divisors = 1 if layer.latent_norm is None else root_mean_square(layer, x1[:, :-1], "key_value")
        written = sum(patterns[h] / divisors @ (x1 @ bilinear.ov(h)) for h in range(layer.n_heads))
        assert not written[:, -1].any()
        assert_close(written[:, :-1] + (0 if layer.b_O is None else layer.b_O), outputs, np.float32, factor=64)


def test_frozen_gives_the_outputs_under_the_models_own_patterns(layers: Layers) -> None:
    for layer, (_, patterns, _, x, outputs) in layers:
        frozen = layer.frozen(patterns, divisors=layer.value_divisors(x))
        assert_close(frozen.apply(x), outputs, np.float32, factor=64)


def test_tensors_over_distances_hold_the_forms(layers: Layers) -> None:
    layer = layers[0][0].numerator()
    d, dh, far = layer.d_model, layer.d_head, np.arange(-3, 12)
    turning = 0 if layer.rotary is None else layer.rotary.n_columns
    for head in range(layer.n_heads):
        tensor = layer.qk_tensor(head, far)
        assert tensor.shape == (len(far), d + 1, d + 1)
        shifted = layer.depends_on_distance and not turning
        waves = turning + (turning < dh) if turning else 1 + shifted
        assert tensor.ranks == (waves, dh + shifted, dh + shifted)
        dense = tensor.full()
        for k, distance in enumerate(far):
            assert_close(dense[k], layer.qk(head, int(distance)).full(), np.float32, factor=16)


def test_operators_stay_factors(layers: Layers) -> None:
    layer = layers[0][0].numerator()
    d, dh = layer.d_model + 1, layer.d_head
    rank = dh + (layer.depends_on_distance and layer.rotary is None)
    assert [a.shape for a in layer.qk(0, 1).arrays()] == [(d, rank), (rank, d)]
    assert [a.shape for a in layer.ov(0).arrays()] == [(d, layer.d_value), (layer.d_value, d)]


def test_groups_hold_the_forms_of_their_heads(layers: Layers) -> None:
    layer = layers[1][0].numerator()
    d, size = layer.d_model + 1, layer.group_size
    for kv_head in range(layer.kv_heads):
        queries, values = layer.qk_group(kv_head, 2), layer.ov_group(kv_head)
        assert (queries.shape, values.shape) == ((size * d, d), (d, size * d))
        assert values.ranks == (layer.d_value,)
        assert queries.ranks == (layer.d_head + (layer.depends_on_distance and layer.rotary is None),)
        for k, head in enumerate(range(kv_head * size, (kv_head + 1) * size)):
            mine = slice(k * d, (k + 1) * d)
            np.testing.assert_allclose(queries.full()[mine], layer.qk(head, 2).full(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(values.full()[:, mine], layer.ov(head).full(), rtol=1e-5, atol=1e-5)


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
    if not layer.depends_on_distance:
        np.testing.assert_array_equal(layer.qk(0).full(), layer.qk(0, 5).full())
        with refused(ArgumentError, "Attention.qk: plane", "rotary"):
            layer.qk(0, 0, plane=0)
        return
    with refused(ArgumentError, "Attention.qk: distance must be given", "rotary" if layer.rotary else "ALiBi"):
        layer.qk(0)
    if layer.rotary is None:
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
    with refused(ArgumentError, "Attention.qk_tensor: distances must hold at least one distance, got none"):
        layer.qk_tensor(0, [])
    for wrong in ([0.5], [[1]], 3, [[1], [1, 2]]):
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


def test_forms_of_normalised_latent_vectors_are_refused(saved: Any) -> None:
    layer = open_checkpoint(saved("deepseek_v3")[1]).attention(0)
    for call in (lambda: layer.qk(0, 1), lambda: layer.qk_tensor(0, [1]), lambda: layer.qk_group(0, 1)):
        with refused(ArgumentError, "no bilinear form", "latent vectors", "numerator()"):
            call()
    for call in (lambda: layer.ov(0), lambda: layer.ov_group(0)):
        with refused(ArgumentError, "Attention.ov: values", "latent vectors", "numerator()"):
            call()
    with refused(ArgumentError, "Attention.frozen: divisors must be given", "value_divisors"):
        layer.frozen(np.ones((4, 3, 3)))
    with refused(ArgumentError, "Attention.stacked: values", "5 and 10"):
        layer.stacked()
    assert "normalised latent vectors" in repr(layer)


# ------------------------------------------------------------------------------------------------ relative biases


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize(("n_bins", "max_distance"), [(32, 128), (12, 7), (64, 1000), (4, 3)])
def test_bins_of_distances_are_those_of_the_model(n_bins: int, max_distance: int, one_sided: bool) -> None:
    import torch
    from tnlib_adapters.attention.relative_bias import RelativeBias
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-3000, 3000)
    bias = RelativeBias(np.arange(float(n_bins))[None], max_distance, one_sided)
    of_model = T5Attention._relative_position_bucket(torch.from_numpy(-distances), not one_sided, n_bins, max_distance)
    np.testing.assert_array_equal(bias.at(distances)[0], of_model.numpy())
    assert bias.at(distances.reshape(60, 100)).shape == (1, 60, 100)


def test_relative_biases_that_fit_no_layer_are_refused() -> None:
    from tnlib_adapters.attention.relative_bias import RelativeBias
    from tnlib_adapters.attention.rotary import Rotary

    with refused(ArgumentError, "RelativeBias: table", "10 and 20"):
        RelativeBias(np.ones((2, 10)), 20)
    with refused(ArgumentError, "RelativeBias: table", "quarter", "8 and 2"):
        RelativeBias(np.ones((2, 8)), 2)
    with refused(ArgumentError, "RelativeBias: table", "half", "8 and 4"):
        RelativeBias(np.ones((2, 8)), 4, one_sided=True)
    w, bias = np.random.default_rng(0).standard_normal((4, 1, 6, 4)), RelativeBias(np.ones((1, 8)), 5)
    with refused(ArgumentError, "rotary and relative_bias exclude each other"):
        Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), 1.0, relative_bias=bias, rotary=Rotary([1.0]))
    with refused(ArgumentError, "Attention: relative_bias", "1 heads, got 2"):
        two = RelativeBias(np.ones((2, 8)), 5)
        Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), 1.0, relative_bias=two)
    with refused(ArgumentTypeError, "Attention: relative_bias", "ndarray"):
        wrong: Any = np.ones((1, 8))
        Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), 1.0, relative_bias=wrong)


# -------------------------------------------------------------------------------------------------- cross-attention


def test_cross_attention_reads_two_sequences(saved: Any) -> None:
    own, cross = (open_checkpoint(saved("t5")[1]).attention(layer) for layer in (2, 3))
    x, memory = np.ones((3, 24), np.float32), np.ones((5, 24), np.float32)
    assert (own.causal, own.cross, cross.causal, cross.cross) == (True, False, False, True)
    assert repr(own).endswith(", relative bias)")
    assert repr(cross).endswith(", cross-attention)")
    assert repr(own.relative_bias) == "RelativeBias(12 bins up to distance 7, one-sided)"
    assert cross.relative_bias is None
    assert cross.scores(x, memory).shape == (4, 3, 5)
    assert cross.mask(3, 5).shape == (3, 5)
    assert cross.output(np.ones((4, 3, 5), np.float32), memory).shape == (3, 24)
    np.testing.assert_array_equal(cross.qk(0).full(), cross.qk(0, 5).full())
    with refused(ArgumentError, "Attention.scores: memory must be given for cross-attention"):
        cross.scores(x)
    with refused(ArgumentError, "Attention.scores: memory is only for cross-attention"):
        own.scores(x, memory)
    with refused(ArgumentError, "Attention.scores: memory must have shape (positions, 24)"):
        cross.scores(x, memory[:, :23])
    with refused(ArgumentError, "Attention.mask: n_keys must be given for cross-attention"):
        cross.mask(3)
    with refused(ArgumentError, "Attention.mask: n_keys is only for cross-attention"):
        own.mask(3, 5)
    for wrong in ({"causal": True}, {"window": 3}, {"alibi": np.ones(4)}, {"relative_bias": own.relative_bias}):
        with refused(ArgumentError, "Attention: cross-attention must have no mask"):
            replace(cross, **wrong)


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
    for name, word in (("llama", "rotary"), ("bloom", "ALiBi"), ("t5_encoder", "a relative bias")):
        checkpoint = open_checkpoint(saved(name)[1])
        with refused(ArgumentError, "Checkpoint.positions", checkpoint.architecture.model_type, "distance"):
            checkpoint.positions()
        with refused(ArgumentError, "Attention.qk_positions", word):
            checkpoint.attention(0).qk_positions(0, np.ones((3, 24)))
    with refused(ArgumentError, "Attention.qk_positions: positions", "(3, 25)"):
        open_checkpoint(saved("opt")[1]).attention(0).qk_positions(0, np.ones((3, 25)))


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
