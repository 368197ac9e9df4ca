"""Factors in the place of weights: what every kind multiplies out to, how it is described, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, change_config, change_tensors
from oracles import assert_close, normal, refused
from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.factors.config_section import KEY, describe, descriptions
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes, stack, unstack

import tnlib
from tnlib import FileFormatError

D, HEADS = 12, 3
DH = D // HEADS
SIZES = Sizes(n_layers=2, n_heads=HEADS, d_model=D)
LAYERS = ["layers.0.attention", "layers.1.attention"]


def draw(*shape: int) -> np.ndarray:
    return normal(shape, np.float32, seed=sum(shape))


def weights() -> Projections:
    return Projections({name: normal((D, D), seed=i) for i, name in enumerate(NAMES)}, {})


# --------------------------------------------------------------------------------------------------- multiplied out


def test_expansion_is_in_double_precision() -> None:
    left, right = draw(D, 5), draw(5, D)
    found = expand([FactoredMatrix("low_rank", "k", {"left": left, "right": right})], SIZES)
    assert found.weights["k"].dtype == np.float64
    assert_close(found.weights["k"], left.astype(float) @ right.astype(float))
    assert not found.biases


def test_dense_and_ttm() -> None:
    weight, cores = draw(D, D), [draw(1, 3, 4, 5), draw(5, 4, 3, 1)]  # (3 4) x (4 3)
    ttm = FactoredMatrix("ttm", "v", {"core0": cores[0], "core1": cores[1]})
    found = expand([FactoredMatrix("dense", "o", {"weight": weight}), ttm], SIZES).weights
    np.testing.assert_array_equal(found["o"], weight)
    assert_close(found["v"], np.einsum("amnb,bpqc->mpnq", *map(wide, cores)).reshape(D, D))


@pytest.mark.parametrize("kind", ["tucker", "cp", "stack"])
def test_formats_of_all_four_projections(kind: str) -> None:
    shape = (4, HEADS, D, DH)
    if kind == "tucker":
        core, factors = draw(2, 3, 5, 4), [draw(n, r) for n, r in zip(shape, (2, 3, 5, 4), strict=True)]
        arrays = {"core": core} | {f"factor{k}": f for k, f in enumerate(factors)}
        dense = np.einsum("abcd,ia,jb,kc,ld->ijkl", *(a.astype(float) for a in (core, *factors)))
    elif kind == "cp":
        scales, factors = draw(6), [draw(n, 6) for n in shape]
        arrays = {"weights": scales} | {f"factor{k}": f for k, f in enumerate(factors)}
        dense = np.einsum("r,ir,jr,kr,lr->ijkl", *(a.astype(float) for a in (scales, *factors)))
    else:
        arrays = {"stack": draw(*shape)}
        dense = arrays["stack"].astype(float)
    found = expand([FactoredMatrix(kind, "qkvo", arrays)], SIZES).weights
    for p, name in enumerate("qkv"):
        for h in range(HEADS):
            assert_close(found[name][:, h * DH : (h + 1) * DH], dense[p, h])
    for h in range(HEADS):
        assert_close(found["o"][h * DH : (h + 1) * DH], dense[3, h].T)


@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 1), (0, 3, 0), (1, 0, 0)])
@pytest.mark.parametrize("biases", [True, False])
def test_heads_fill_the_first_columns_of_their_slots(ranks: tuple[int, ...], biases: bool) -> None:
    """Each head's QK and OV operator, biases included, is the product of its own columns and rows."""
    r, rows = sum(ranks), D + int(biases)
    qk = {"left": draw(rows, r), "right": draw(r, rows) + 1}
    vo = {"left": draw(rows, r) + 2, "right": draw(r, D) + 3}
    found = expand([FactoredMatrix("heads", "qk", qk, ranks), FactoredMatrix("heads", "vo", vo, ranks)], SIZES)
    assert set(found.weights) == set(NAMES)
    assert set(found.biases) == (set("qkv") if biases else set())
    q, k, v = (np.concatenate([found.weights[n], found.biases[n][None]]) if biases else found.weights[n] for n in "qkv")
    start = 0
    for h, rank in enumerate(ranks):
        slot, own = slice(h * DH, (h + 1) * DH), slice(start, start + rank)
        assert_close(q[:, slot] @ k[:, slot].T, wide(qk["left"][:, own]) @ wide(qk["right"][own]))
        assert_close(v[:, slot] @ found.weights["o"][slot], wide(vo["left"][:, own]) @ wide(vo["right"][own]))
        assert not q[:, h * DH + rank : (h + 1) * DH].any()
        start += rank


def wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64)


# -------------------------------------------------------------------------------------------------- stack, unstack


def test_unstack_undoes_stack() -> None:
    whole = weights()
    x = stack(whole, SIZES)
    assert x.shape == (4, HEADS, D, DH)
    for name, weight in unstack(x).weights.items():
        np.testing.assert_array_equal(weight, whole.weights[name])


def test_a_stack_is_that_of_the_attention_layer() -> None:
    checkpoint = open_checkpoint(builtin_path())
    x = stack(checkpoint.projections(1), checkpoint.sizes)
    np.testing.assert_array_equal(x, checkpoint.attention(1).stacked())


# ---------------------------------------------------------------------------------------------------- descriptions


def test_a_piece_describes_itself_and_is_found_again_after_json() -> None:
    parts = {"left": draw(D + 1, 3), "right": draw(3, D + 1)}
    piece = FactoredMatrix("heads", "qk", parts, (1, 2, 0), module=LAYERS[0])
    assert piece.n_parameters == 2 * 3 * (D + 1)
    config = json.loads(json.dumps({KEY: describe([piece.describe()], LAYERS, "heads")}))
    assert config[KEY]["layers"] == [
        [{"kind": "heads", "of": "qk", "shapes": {"left": [13, 3], "right": [3, 13]}, "ranks": [1, 2, 0]}],
        [],
    ]
    assert descriptions(config, LAYERS, SIZES) == [piece.describe()]
    assert config[KEY]["quant_method"] == "tnlib"
    assert config[KEY]["method"] == "heads"


def test_an_ordinary_checkpoint_describes_no_pieces() -> None:
    assert descriptions({}, LAYERS, SIZES) is None
    assert descriptions({KEY: None}, LAYERS, SIZES) is None


GOOD = {"kind": "low_rank", "of": "q", "shapes": {"left": [12, 3], "right": [3, 12]}, "ranks": []}


def section(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "tnlib", "version": 1, "method": "matrix", "layers": [[GOOD], []]} | changes


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != key}


DAMAGED: dict[str, tuple[Any, str]] = {
    "of another method": (section(quant_method="gptq"), "gptq"),
    "no method": ({"version": 1}, KEY),
    "text": ("tnlib", KEY),
    "newer version": (section(version=2), "version 2"),
    "no version": ({"quant_method": "tnlib", "layers": []}, "version None"),
    "no layers": (section(layers=None), "damaged"),
    "layers by name": (section(layers={"0": []}), "damaged"),
    "layer that is no list": (section(layers=[GOOD, []]), "damaged"),
    "piece that is no object": (section(layers=[["q"], []]), "damaged"),
    **{f"no {key}": (section(layers=[[without(key)], []]), "damaged") for key in GOOD},
    **{
        f"{key} is {value!r}": (section(layers=[[GOOD | {key: value}], []]), "damaged")
        for key, value in [
            ("kind", "eval"),
            ("kind", ["low_rank"]),
            ("of", "x"),
            ("shapes", [[12, 3]]),
            ("shapes", {"left": 12}),
            ("shapes", {"left": [12, -3]}),
            ("shapes", {"left": [True, 3]}),
            ("ranks", [-1]),
            ("ranks", ["1"]),
        ]
    },
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_descriptions_are_refused(case: str) -> None:
    damaged, word = DAMAGED[case]
    with refused(FileFormatError, "open_checkpoint", word):
        descriptions({KEY: damaged}, LAYERS, SIZES)


LOW_RANK = {"left": np.ones((D, 2)), "right": np.ones((2, D))}
HEADS_QK = {"left": np.ones((D, 6)), "right": np.ones((6, D))}
FACTORS = {f"factor{k}": np.ones((n, DH)) for k, n in enumerate((4, HEADS, D, DH))}


def tucker_parts(core: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"core": np.ones(core)} | {f"factor{k}": np.ones((n, n)) for k, n in enumerate((4, HEADS, D, DH))}


IMPOSSIBLE: dict[str, FactoredMatrix] = {
    "part missing": FactoredMatrix("low_rank", "q", {"left": np.ones((D, 2))}),
    "parts of other names": FactoredMatrix("ttm", "q", {"a": np.ones((1, D, D, 1))}),
    "no parts": FactoredMatrix("tucker", "qkvo", {}),
    "inner sizes differ": FactoredMatrix("low_rank", "q", {"left": np.ones((D, 2)), "right": np.ones((3, D))}),
    "outer sizes differ": FactoredMatrix("low_rank", "q", {"left": np.ones((D - 1, 2)), "right": np.ones((2, D))}),
    "two projections in one matrix": FactoredMatrix("low_rank", "qk", LOW_RANK),
    "projections in a part of another name": FactoredMatrix("dense", "q", {"whole": np.ones((D, D))}),
    "one projection in pairs": FactoredMatrix("heads", "q", HEADS_QK, (2, 2, 2)),
    "a pair in the other order": FactoredMatrix("heads", "ov", HEADS_QK, (2, 2, 2)),
    "heads without ranks": FactoredMatrix("heads", "qk", HEADS_QK),
    "too few ranks": FactoredMatrix("heads", "qk", HEADS_QK, (3, 3)),
    "a rank that runs into the next head": FactoredMatrix("heads", "qk", HEADS_QK, (5, 1, 0)),
    "ranks that do not add up": FactoredMatrix("heads", "qk", HEADS_QK, (1, 1, 1)),
    "two projections in a stack of four": FactoredMatrix("stack", "qk", {"stack": np.ones((4, HEADS, D, DH))}),
    "a stack of other heads": FactoredMatrix("stack", "qkvo", {"stack": np.ones((4, HEADS + 1, D, DH))}),
    "a flat stack": FactoredMatrix("stack", "qkvo", {"stack": np.ones((4, D * D))}),
    "cores that do not join": FactoredMatrix(
        "ttm", "q", {"core0": np.ones((1, 3, 3, 2)), "core1": np.ones((3, 4, 4, 1))}
    ),
    "a core without bond": FactoredMatrix("ttm", "q", {"core0": np.ones((1, D, D))}),
    "cores that are not joined": FactoredMatrix(
        "ttm", "q", {"core0": np.ones((1, 3, 3, 0)), "core1": np.ones((0, 4, 4, 1))}
    ),
    "ranks of a core that differ": FactoredMatrix("tucker", "qkvo", tucker_parts((4, HEADS, D, 3))),
    "a core of fewer legs": FactoredMatrix("tucker", "qkvo", tucker_parts((4, HEADS, D))),
    "weights of another rank": FactoredMatrix("cp", "qkvo", FACTORS | {"weights": np.ones(DH + 1)}),
    "rows of other heads": FactoredMatrix(
        "heads", "qk", {"left": np.ones((D + 2, 6)), "right": HEADS_QK["right"]}, (2, 2, 2)
    ),
    "a bias of an output in a row": FactoredMatrix(
        "heads", "vo", {"left": HEADS_QK["left"], "right": np.ones((6, D + 1))}, (2, 2, 2)
    ),
    "a bias of two projections": FactoredMatrix("heads", "qk", HEADS_QK | {"bias": np.ones(D)}, (2, 2, 2)),
    "a bias of another width": FactoredMatrix("low_rank", "q", LOW_RANK | {"bias": np.ones(D + 1)}),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_factors_that_do_not_fit_are_refused(case: str) -> None:
    piece = IMPOSSIBLE[case]
    config = {KEY: describe([replace(piece.describe(), module=LAYERS[0])], LAYERS, "test")}
    with refused(FileFormatError, "open_checkpoint", repr(piece.of), repr(piece.kind), "compress again"):
        descriptions(json.loads(json.dumps(config)), LAYERS, SIZES)


# ----------------------------------------------------------------------------------------- in a checkpoint's folder

Pieces = list[list[FactoredMatrix]]


def as_heads(path: Path) -> Pieces:
    """Every layer's own operators, exactly: the columns of each head are its factors."""
    layers = []
    for layer in range(2):
        p = open_checkpoint(path).projections(layer)
        q, k, v = (np.concatenate([p.weights[n], p.biases[n][None]]) for n in "qkv")
        qk, vo = {"left": q, "right": k.T}, {"left": v, "right": p.weights["o"]}
        layers.append([FactoredMatrix("heads", "qk", qk, (16,) * 4), FactoredMatrix("heads", "vo", vo, (16,) * 4)])
    return layers


def as_matrices(path: Path) -> Pieces:
    layers = []
    for layer in range(2):
        p = open_checkpoint(path).projections(layer)
        fits = {name: tnlib.svd(weight).value for name, weight in p.weights.items()}
        parts = {name: {"left": fit.u * fit.s, "right": fit.vh} for name, fit in fits.items()}
        layers.append([FactoredMatrix("low_rank", name, arrays) for name, arrays in parts.items()])
    return layers


def write_factored(folder: Path, layers: Pieces) -> None:
    """Put factors in the place of the tensors they stand for."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        modules = dict(zip(NAMES, ("query", "key", "value", "output"), strict=True))
        for layer, pieces in enumerate(layers):
            base = f"layers.{layer}.attention"
            for piece in pieces:
                for name in piece.of:
                    del tensors[f"{base}.{modules[name]}.weight"]
                    if piece.kind == "heads" and name != "o":
                        del tensors[f"{base}.{modules[name]}.bias"]
                for part, values in piece.arrays.items():
                    tensors[f"{base}.tnlib.{piece.of}_{part}"] = values.astype(np.float32)

    change_tensors(folder, change)
    placed = [replace(one, module=LAYERS[layer]) for layer, pieces in enumerate(layers) for one in pieces]
    change_config(folder, **{KEY: describe([piece.describe() for piece in placed], LAYERS, "test")})


@pytest.fixture
def factored(tmp_path: Path) -> Path:
    folder = builtin_copy(tmp_path / "factored")
    write_factored(folder, as_heads(folder))
    return folder


@pytest.mark.parametrize("make", [as_heads, as_matrices])
def test_a_factored_checkpoint_opens_like_any_other(make: Callable[[Path], Pieces], tmp_path: Path) -> None:
    whole, folder = open_checkpoint(builtin_path()), builtin_copy(tmp_path / "factored")
    write_factored(folder, make(folder))
    found = open_checkpoint(folder)
    for layer in range(2):
        one, other = found.attention(layer), whole.attention(layer)
        assert one.scale == other.scale
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            assert_close(getattr(one, name), getattr(other, name), np.float32)


def first_piece(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        pieces = json.loads((folder / "config.json").read_text())[KEY]
        pieces["layers"][0][0] |= changes
        change_config(folder, **{KEY: pieces})

    return change


def without_piece(folder: Path) -> None:
    pieces = json.loads((folder / "config.json").read_text())[KEY]
    del pieces["layers"][1][1]
    change_config(folder, **{KEY: pieces})


LEFT = "layers.0.attention.tnlib.qk_left"

AT_OPENING: Mapping[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "factor missing": (lambda f: change_tensors(f, lambda t: t.pop(LEFT)), (LEFT, "missing")),
    "factor of another shape": (
        lambda f: change_tensors(f, lambda t: t.update({LEFT: t[LEFT][1:]})),
        (LEFT, "(65, 64)", "(64, 64)"),
    ),
    "projection in no piece": (without_piece, ("layers.1.attention.value.weight", "missing")),
    "another count of layers": (
        lambda f: change_config(f, **{KEY: describe([], LAYERS[:1], "test")}),
        ("config.json", "2 layers", "got 1"),
    ),
    "bias of another shape": (
        lambda f: change_tensors(f, lambda t: t.update({"layers.0.attention.output.bias": np.ones(3, "f4")})),
        ("layers.0.attention.output.bias", "(64,)", "(3,)"),
    ),
}


@pytest.mark.parametrize("case", AT_OPENING)
def test_factored_folders_that_contradict_themselves_are_refused(case: str, factored: Path) -> None:
    break_it, words = AT_OPENING[case]
    open_checkpoint(factored)
    break_it(factored)
    with refused(FileFormatError, "open_checkpoint", *words):
        open_checkpoint(factored)


def test_ranks_that_run_into_the_next_head_are_refused(factored: Path) -> None:
    first_piece(ranks=[17, 15, 16, 16])(factored)
    with refused(FileFormatError, "'qk'", "'heads'", "17"):
        open_checkpoint(factored)


def test_nan_in_a_factor_is_refused_by_name(factored: Path) -> None:
    change_tensors(factored, lambda t: t.update({LEFT: t[LEFT] * np.nan}))
    with refused(FileFormatError, repr(LEFT), "nan"):
        open_checkpoint(factored).attention(0)
