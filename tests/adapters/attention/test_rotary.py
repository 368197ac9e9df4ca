"""Rotary embeddings as operators: what is exact about them, and the frequencies of every scaled variant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, normal, refused
from tnlib_adapters import Attention, HeadNorm
from tnlib_adapters.architectures.config_keys import read_settings
from tnlib_adapters.architectures.layer_settings import alibi_slopes
from tnlib_adapters.architectures.rope_scaling import Frequencies, read_frequencies
from tnlib_adapters.architectures.table import ARCHITECTURES
from tnlib_adapters.attention.rotary import Rotary

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError

D, DH = 12, 8
positions = st.integers(-1000, 1000)


def turning(n_planes: int, *, pairs: bool = False, factor: float = 1.0) -> Rotary:
    return Rotary(10.0 ** -np.arange(n_planes), pairs=pairs, factor=factor)


def layer(n_planes: int, *, pairs: bool = False, factor: float = 1.0, dtype: Any = np.float64) -> Attention:
    w = normal((4, 2, D, DH), seed=0).astype(dtype)
    b = normal((2, 2, DH), seed=1).astype(dtype)
    turn = turning(n_planes, pairs=pairs, factor=factor)
    return Attention(
        w[0], w[1], w[2], w[3].transpose(0, 2, 1), scale=0.3, b_Q=b[0], b_K=b[1], rotary=turn, context=5000
    )


def unfolding_ranks(x: np.ndarray) -> tuple[int, ...]:
    return tuple(
        int(np.linalg.matrix_rank(np.moveaxis(x, k, 0).reshape(x.shape[k], -1), rtol=1e-10)) for k in range(x.ndim)
    )


layouts = pytest.mark.parametrize(
    ("n_planes", "pairs", "factor"),
    [(4, False, 1.0), (4, True, 1.0), (2, False, 1.0), (3, True, 1.3), (1, False, 1.2), (4, False, 1.3)],
)


# ------------------------------------------------------------------------------------------------------- rotations


@layouts
@given(i=positions, j=positions, seed=st.integers(0, 20))
def test_a_score_depends_on_the_distance_alone(
    n_planes: int, pairs: bool, factor: float, i: int, j: int, seed: int
) -> None:
    turn, (q, k) = turning(n_planes, pairs=pairs, factor=factor), normal((2, DH), seed=seed)
    apart = turn.rotate(q, i) @ turn.rotate(k, j)
    assert abs(apart - turn.rotate(q, i - j) @ turn.rotate(k, 0)) < 1e-9
    waves = turn.waves(np.array([i - j]))[0]
    waves = waves if turn.n_columns == DH else np.append(waves, 1)
    assert abs(apart - np.einsum("w,wab,a,b->", waves, turn.core(DH), q, k)) < 1e-9


@layouts
def test_rotations_keep_lengths_up_to_the_factor(n_planes: int, pairs: bool, factor: float) -> None:
    turn, q = turning(n_planes, pairs=pairs, factor=factor), normal((5, DH), seed=0)
    turned = turn.rotate(q, np.arange(5))
    n = turn.n_columns
    np.testing.assert_allclose(
        np.linalg.norm(turned[:, :n], axis=1), factor * np.linalg.norm(q[:, :n], axis=1), rtol=1e-13
    )
    np.testing.assert_array_equal(turned[:, n:], q[:, n:])
    assert turned.dtype == q.dtype


def test_the_two_layouts_differ_by_an_order_of_columns() -> None:
    order = np.arange(DH).reshape(2, -1).T.ravel()  # 0 4 1 5 ...
    q = normal((DH,), seed=0)
    halves, pairs = turning(4).rotate(q, 3), turning(4, pairs=True).rotate(q[order], 3)
    np.testing.assert_allclose(halves[order], pairs)


@pytest.mark.parametrize("wrong", [[], [[1.0]], 1.0])
def test_frequencies_of_the_wrong_shape_are_refused(wrong: Any) -> None:
    with refused(ArgumentError, "Rotary: frequencies"):
        Rotary(wrong)
    with refused(ArgumentError, "Rotary: factor", "0"):
        Rotary([1.0], factor=0)
    with refused(ArgumentError, "Rotary: factor must be positive, got None"):
        Rotary([1.0], factor=None)  # type: ignore[arg-type]


def test_columns_that_do_not_fit_are_refused() -> None:
    turn, norm = Rotary([1.0, 0.1]), HeadNorm(np.ones(4), np.ones(4), 1e-6)
    for columns, position in (
        (np.ones((3, 3)), 1),
        (None, 1),
        (np.ones((3, 4)), "a"),
        (np.ones((3, 4)), None),
        (np.ones((3, 4)), [1, 2]),
    ):
        with refused(ValueError, "Rotary.rotate: ", "must", "got"):
            turn.rotate(columns, position)  # type: ignore[arg-type]
    for name, normed in (("queries", norm.queries), ("keys", norm.keys)):
        for x in (np.ones((2, 3)), None, 2.5, np.float64(1)):
            with refused(ValueError, f"HeadNorm.{name}: x must have shape (..., 4)"):
                normed(x)  # type: ignore[arg-type]
    for query, key, eps in ((np.ones(3), np.ones(4), 1e-6), (np.ones(4), np.ones(4), -1.0)):
        with refused(ValueError, "HeadNorm: "):
            HeadNorm(query, key, eps)
    with refused(TypeError, "HeadNorm: query"):
        HeadNorm(None, np.ones(4), 1e-6)  # type: ignore[arg-type]


def test_more_columns_than_a_head_has_are_refused() -> None:
    with refused(ArgumentError, "Attention: rotary", "8 columns", "10"):
        layer(5)
    with refused(ArgumentError, "rotary and alibi"):
        Attention(**(vars(layer(4)) | {"alibi": np.ones(2)}))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("rotary", [1.0], ArgumentTypeError),
        ("head_norm", np.ones(DH), ArgumentTypeError),
        ("window", 2.5, ArgumentTypeError),
        ("context", "9", ArgumentTypeError),
        ("softcap", True, ArgumentTypeError),
        ("window", 0, ArgumentError),
        ("context", -1, ArgumentError),
        ("softcap", 0.0, ArgumentError),
    ],
)
def test_facts_of_the_wrong_kind_are_refused(name: str, value: Any, kind: type[Exception]) -> None:
    with refused(kind, f"Attention: {name}"):
        Attention(**(vars(layer(4)) | {name: value}))


# ------------------------------------------------------------------------------------------------- tensors and planes


@layouts
def test_the_tensor_has_the_multilinear_rank_of_the_rotation(n_planes: int, pairs: bool, factor: float) -> None:
    one = layer(n_planes, pairs=pairs, factor=factor)
    tensor = one.qk_tensor(1, np.arange(-30, 31))
    waves = 2 * n_planes + (2 * n_planes < DH)
    assert tensor.ranks == (waves, DH, DH)
    assert unfolding_ranks(tensor.full()) == (waves, DH, DH)
    assert tensor.n_parameters == 61 * waves + 2 * (D + 1) * DH + waves * DH * DH


@layouts
def test_planes_and_the_rest_add_up(n_planes: int, pairs: bool, factor: float) -> None:
    one, far = layer(n_planes, pairs=pairs, factor=factor), np.arange(-5, 20)
    whole = one.qk_tensor(0, far).full()
    parts = [one.qk_tensor(0, far, plane=f) for f in range(n_planes)]
    q, k = (np.vstack([w[0], b[0]])[:, 2 * n_planes :] for w, b in ((one.W_Q, one.b_Q), (one.W_K, one.b_K)))
    assert all(part.ranks == (2, 2, 2) for part in parts)
    assert_close(sum(part.full() for part in parts) + q @ k.T, whole)
    for f, part in enumerate(parts):
        form = one.qk(0, 7, plane=f)
        assert form.ranks == (2,)
        assert_close(part.full()[12], form.full())
    np.testing.assert_array_equal(one.qk(0, 7, plane=-1).full(), one.qk(0, 7, plane=n_planes - 1).full())


def test_a_tensor_over_many_distances_is_never_dense() -> None:
    rng = np.random.default_rng(0)
    d, dh = 1024, 64
    w = rng.standard_normal((4, 1, d, dh)).astype(np.float32)
    wide = Attention(
        w[0], w[1], w[2], w[3].transpose(0, 2, 1), scale=1.0, rotary=Rotary(1e4 ** -np.linspace(0, 1, dh // 2))
    )
    tensor = wide.qk_tensor(0, np.arange(100_000))  # dense: 4e11 bytes
    assert tensor.shape == (100_000, d + 1, d + 1)
    assert tensor.dtype == np.float32
    assert tensor.n_parameters < 7e6


def test_distance_zero_is_the_product_of_the_weights() -> None:
    one = layer(4)
    assert_close(one.qk(1, 0).full()[:-1, :-1], one.W_Q[1] @ one.W_K[1].T)
    assert np.linalg.norm(one.qk(1, 1).full() - one.qk(1, 0).full()) > 0.1 * np.linalg.norm(one.qk(1, 0).full())


def test_single_precision_stays_single() -> None:
    one = layer(3, dtype=np.float32)
    assert one.qk(0, 4000).dtype == one.qk_tensor(0, [1]).dtype == one.scores(np.ones((3, D), np.float32)).dtype
    assert one.qk(0, 4000).dtype == np.float32
    want = layer(3).qk(0, 4000).full()  # angles are multiplied in double precision, however far
    assert_close(one.qk(0, 4000).full(), want, np.float32)


# --------------------------------------------------------------------------------------------------------- ALiBi


def sloped(n_heads: int = 4) -> Attention:
    w = normal((4, n_heads, D, DH), seed=0)
    return Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), scale=0.3, alibi=alibi_slopes(n_heads))


def test_alibi_is_one_more_rank_on_the_constant_coordinate() -> None:
    one, x = sloped(), normal((6, D), seed=3)
    x1 = np.hstack([x, np.ones((6, 1))])
    for head, slope in enumerate(alibi_slopes(4)):
        tensor = one.qk_tensor(head, np.arange(6))
        assert unfolding_ranks(tensor.full()) == tensor.ranks == (2, DH + 1, DH + 1)
        for far in range(6):
            plain = 0.3 * x @ one.W_Q[head] @ one.W_K[head].T @ x.T - slope * far
            assert_close(0.3 * x1 @ one.qk(head, far).full() @ x1.T, plain)
            assert_close(0.3 * x1 @ tensor.full()[far] @ x1.T, plain)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 6, 8, 12, 16, 25, 71, 112])
def test_slopes_are_those_of_transformers(n_heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    torch = pytest.importorskip("torch")
    biases = bloom.build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32).numpy()  # heads, 1, distances 0 and 1
    np.testing.assert_allclose(alibi_slopes(n_heads), np.abs(np.diff(biases)).ravel(), rtol=1e-6)


# --------------------------------------------------------------------------------------------------- scaled variants

BIG = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
PHI3 = {"hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072}
PHI3 |= {"original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHORT, LONG = list(np.linspace(1, 2.5, 48)), list(np.linspace(1, 60, 48))


def yarn(**options: Any) -> dict[str, Any]:
    parameters = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, **options}
    return {**BIG, "max_position_embeddings": 65536, "rope_parameters": parameters}


# The settings of released models, and those around their corners: name -> (class, config, length).
VARIANTS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "llama 2": ("LlamaConfig", {**BIG, "max_position_embeddings": 4096}, None),
    "llama 3.1": (
        "LlamaConfig",
        {
            **BIG,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
        None,
    ),
    "linear": ("LlamaConfig", {**BIG, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, None),
    "ntk": ("LlamaConfig", {**BIG, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 2048),
    "ntk, longer": ("LlamaConfig", {**BIG, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 9000),
    "qwen yarn": (
        "Qwen2Config",
        {
            **BIG,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        100_000,
    ),
    "yarn, all options": (
        "LlamaConfig",
        yarn(beta_fast=20, beta_slow=2, mscale=1.0, mscale_all_dim=0.7, truncate=False),
        None,
    ),
    "yarn, no plane between fast and slow": ("LlamaConfig", yarn(beta_fast=8, beta_slow=8, truncate=False), None),
    "yarn, stated factor": ("LlamaConfig", yarn(attention_factor=1.1), None),
    "phi 3, short": (
        "Phi3Config",
        {**PHI3, "rope_parameters": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
        4096,
    ),
    "phi 3, long": (
        "Phi3Config",
        {**PHI3, "rope_parameters": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
        4097,
    ),
    "pythia": ("GPTNeoXConfig", {"hidden_size": 512, "num_attention_heads": 8}, None),
    "phi 2": ("PhiConfig", {"hidden_size": 2560, "num_attention_heads": 32}, None),
}


def read(config: dict[str, Any], d_head: int, length: int | None) -> Frequencies | None:
    row = ARCHITECTURES[config["model_type"]]
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 2 * d_head, **config}
    return read_frequencies(row, read_settings(row, config, "config.json", "f"), d_head, length, "f")


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_frequencies_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, values, length = VARIANTS[name]
    config = getattr(transformers, kind)(**values)
    d_head = config.hidden_size // config.num_attention_heads
    got = read(config.to_dict(), d_head, length)
    assert got is not None
    variant = config.rope_parameters["rope_type"]
    if variant == "default":
        n = int(d_head * config.rope_parameters.get("partial_rotary_factor", 1.0))
        want, factor = config.rope_parameters["rope_theta"] ** -(np.arange(0, n, 2) / n), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[variant](config, "cpu", seq_len=length)
        want = frequencies.numpy()
    np.testing.assert_allclose(got.radians, want, rtol=1e-5)
    assert got.factor == pytest.approx(factor, rel=1e-12)
    assert got.context is not None
    assert got.context >= (length or 1)


def test_older_models_name_longrope_otherwise() -> None:
    values = {**PHI3, "model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG}}
    short, long = (read(values, 96, n) for n in (None, 5000))
    assert short is not None
    assert long is not None
    assert (short.context, long.context) == (4096, 131072)
    np.testing.assert_allclose(short.radians[1:] / long.radians[1:], (np.array(LONG) / SHORT)[1:])
    renamed = {**values, "rope_scaling": {**values["rope_scaling"], "type": "yarn"}}
    np.testing.assert_array_equal(read(renamed, 96, None).radians, short.radians)


def test_distances_may_be_any_integers() -> None:
    one = layer(4)
    np.testing.assert_array_equal(one.qk(0, np.int8(-3)).full(), one.qk(0, -3).full())
    np.testing.assert_array_equal(
        one.qk_tensor(0, range(3)).full(), one.qk_tensor(0, np.arange(3, dtype=np.uint8)).full()
    )
    with refused(ArgumentTypeError, "distances"):
        one.qk_tensor(0, [True])


# Where a formula divides by zero: by the logarithm of the base or of the training length, and by differences.
DIVISIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "base 1": ({"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}, ("rope_theta", "got 1.0")),
    "bands that meet": (
        {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4.0},
        ("low_freq_factor", "less than high_freq_factor", "4 and 4"),
    ),
    "one position": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1},
        ("original_max_position_embeddings", "from 2", "got 1"),
    ),
    "one plane": ({"rope_type": "dynamic", "factor": 2.0}, ("at least 4 columns", "dynamic", "got 2")),
}


@pytest.mark.parametrize("case", DIVISIONS)
def test_no_formula_of_a_variant_divides_by_zero(case: str) -> None:
    section, words = DIVISIONS[case]
    config = {"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": section}
    with refused(FileFormatError, "f: ", *words):
        read(config, 2, 65 if section["rope_type"] == "dynamic" else None)
    config["max_position_embeddings"], config["rope_parameters"] = 1, {"rope_type": "longrope", "factor": 2.0}
    with refused(FileFormatError, "f: original_max_position_embeddings", "at least 2, got 1"):
        read(config, 2, None)
