"""Unembeddings, and embeddings that are tied or scaled, under one budget with all other matrices of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
import tnlib_adapters.transformers_plugin  # noqa: E402
from checkpoint_folders import change_config, change_tensors  # noqa: E402
from compressed_folders import by_options, read_config  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from tnlib_adapters import Budget, builtin_path, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compress import factorise  # noqa: E402
from tnlib_adapters.compression.compressed_part import compressed_weights, plain_bytes  # noqa: E402
from tnlib_adapters.compression.methods import components as components_module  # noqa: E402
from tnlib_adapters.compression.methods.components import (  # noqa: E402
    components,
    moments_of_rows,
    nearest_kronecker_product,
    rounding_loss,
    table_components,
)
from tnlib_adapters.reference.model import run  # noqa: E402
from transformers import AutoModel  # noqa: E402
from transformers_models import (  # noqa: E402
    inputs,
    loaded_like,
    outputs,
    random_model,
    save_with_tokenizer,
)

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")
TIED = ("gpt2_lm", "gemma", "opt_narrow", "falcon")
UNTIED = ("llama", "gptj", "gpt_neox")  # the second has a bias, the third has another name in memory
ROLES = {name: ["embedding and unembedding"] for name in TIED} | {name: ["embedding", "unembedding"] for name in UNTIED}
ROLES |= {"t5_encoder": ["embedding"]}  # which several modules hold


def close(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


def reference(folder: Path, tokens: np.ndarray) -> np.ndarray:
    forward = run(open_checkpoint(folder), tokens)
    return forward.hidden if forward.logits is None else forward.logits


def names_in(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def size_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --------------------------------------------------------------------------------------------------------- a folder


@pytest.mark.parametrize("store", mostly_slow(["float", "int8"], ["int8"]))
@pytest.mark.parametrize("name", mostly_slow([*ROLES], ("gemma", "llama", "t5_encoder")))
def test_a_folder_counts_every_matrix_once_and_computes_the_same(
    name: str, store: str, folders: Any, tmp_path: Path
) -> None:
    model, out, keep = random_model(name), tmp_path / "out", 0.1 if name == "gptj" else 0.12
    report = tnlib_adapters.compress(folders[name], out, Budget(keep=keep, store=store), what="all", method="matrix")
    assert keep - 0.01 <= report.kept <= keep
    assert report.measured == pytest.approx(report.predicted, abs=0.02)
    assert report.left_dense == {}
    tables = [matrix for matrix in report.matrices if matrix.role != "feed-forward"]
    assert [matrix.role for matrix in tables] == ROLES[name]
    assert all(matrix.kind == "low_rank" and matrix.n_after < matrix.n_before for matrix in tables)
    attention = [layer.n_before for layer in report.layers], [layer.n_after for layer in report.layers]
    assert report.n_before == sum(attention[0]) + sum(matrix.n_before for matrix in report.matrices)
    assert report.n_after == sum(attention[1]) + sum(matrix.n_after for matrix in report.matrices)
    n_weights = size_of(model)  # of tied ones once
    assert report.n_before + report.n_other == n_weights

    tokens = inputs(model)
    small = loaded_like(model, out)
    wanted = reference(out, tokens)
    close(outputs(small, tokens), wanted)
    assert np.abs(wanted - outputs(model, tokens)).max() > 1e-2 * np.abs(wanted).max()
    scales = sum(p.numel() for parameter, p in small.named_parameters() if parameter.endswith("_scale"))
    assert size_of(small) == n_weights - report.n_before + report.n_after + scales

    small.save_pretrained(tmp_path / "again")
    assert names_in(tmp_path / "again") == names_in(out)
    close(outputs(loaded_like(model, tmp_path / "again"), tokens), wanted)
    dense = small.dequantize()
    assert size_of(dense) == n_weights
    close(outputs(dense, tokens), wanted)
    dense.save_pretrained(tmp_path / "dense")
    assert names_in(tmp_path / "dense") == names_in(folders[name])
    close(outputs(loaded_like(model, tmp_path / "dense"), tokens), wanted)


def test_an_unembedding_counts_as_the_whole_stream(folders: Any, tmp_path: Path) -> None:
    """Counted like one matrix of a layer, a table of many rows is truncated to next to nothing."""
    report = tnlib_adapters.compress(
        builtin_path("llama"), tmp_path / "out", Budget(keep=0.75), what="all", method="matrix"
    )
    table = report.matrices[-1]
    assert (table.role, table.kind) == ("embedding and unembedding", "dense")
    factorisation = factorise(open_checkpoint(folders["llama"]), "matrix", what="all")
    weights = {name: factorisation.weights[name] for name in ("layers.0.mlp.up_proj", "embed_tokens", "lm_head")}
    assert weights == {"layers.0.mlp.up_proj": 1, "embed_tokens": 1, "lm_head": 5}


@pytest.mark.parametrize("name", mostly_slow([*TIED, *UNTIED], ["llama"]))
def test_with_a_text(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    model, out = random_model(name), tmp_path / "out"
    options = {"keep": 0.2, "what": "all", "calibrate": text}
    report = tnlib_adapters.compress(folders[name], out, **by_options(**options))
    assert 0.19 <= report.kept <= 0.2
    kinds = {matrix.role: matrix.kind for matrix in report.matrices if matrix.role != "feed-forward"}
    assert set(kinds.values()) <= {"low_rank", "interpolative", "dense"}
    if name in UNTIED:  # a look-up needs all rows of a factor, a product does not
        assert kinds["embedding"] in ("low_rank", "dense")
    tokens = inputs(model)
    close(outputs(loaded_like(model, out), tokens), reference(out, tokens))
    tnlib_adapters.compress(folders[name], tmp_path / "dense", **by_options(layout="dense", **options))
    close(reference(tmp_path / "dense", tokens), reference(out, tokens), 1e-4)


def test_tied_factors_train_as_one(folders: Any, tmp_path: Path) -> None:
    tnlib_adapters.compress(folders["gpt2_lm"], tmp_path / "out", Budget(keep=0.1), what="all", method="matrix")
    small = loaded_like(random_model("gpt2_lm"), tmp_path / "out")
    left = small.transformer.wte.left
    assert [name for name, _ in small.named_parameters() if "lm_head" in name] == []
    tokens = torch.from_numpy(inputs(small))
    small(input_ids=tokens).logits.square().mean().backward()
    used = left.grad.abs().sum(-1) > 0
    assert bool(used.all())  # look-ups alone reach the rows of these tokens only
    before = small(input_ids=tokens).logits
    with torch.no_grad():
        left.mul_(2)
    assert (small(input_ids=tokens).logits - before).abs().max() > 0.1


def test_half_precision_is_scaled_as_transformers_does(tmp_path: Path) -> None:
    """sqrt(24) is rounded to bfloat16 before it is multiplied."""
    model = random_model("gemma")
    folder, tokens = save_with_tokenizer(model.bfloat16(), tmp_path / "in"), inputs(model)
    tnlib_adapters.compress(folder, tmp_path / "out", Budget(keep=0.1), what="all", method="matrix")
    small = loaded_like(model, tmp_path / "out")
    ids = torch.from_numpy(tokens)
    rows = small.get_input_embeddings().factors.look_up(ids)
    assert torch.equal(small.get_input_embeddings()(ids), rows * torch.tensor(24**0.5, dtype=torch.bfloat16))
    dense = small.dequantize()
    assert torch.equal(
        dense.get_input_embeddings()(ids),
        dense.get_input_embeddings().weight[ids] * torch.tensor(24**0.5, dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("name", ["gpt2_lm", "llama"])
def test_the_part_without_a_head_loads(name: str, folders: Any, tmp_path: Path) -> None:
    tnlib_adapters.compress(folders[name], tmp_path / "out", Budget(keep=0.12), what="all", method="matrix")
    tokens = inputs(random_model(name))
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path / "out").eval()(torch.from_numpy(tokens)).last_hidden_state
    close(hidden.numpy(), run(open_checkpoint(tmp_path / "out"), tokens).hidden)


@pytest.mark.parametrize("name", ["gpt2_lm", "gptj"])
def test_plain_bytes_are_those_of_the_folder(name: str, folders: Any, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(folders[name], tmp_path, Budget(keep=1, store="int8"), what="all", method="matrix")
    weights = compressed_weights(open_checkpoint(folders[name]), "all")
    assert [own.module for own in weights if not own.of] == [matrix.module for matrix in report.matrices]
    assert report.compressed(report.bytes_after) == plain_bytes(weights)


# -------------------------------------------------------------------------------------------- what stays as it is


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_masked", "roberta"])
def test_predictions_of_masked_tokens_share_the_factors(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    model, options = random_model(name), {"keep": 0.12, "what": "all", "method": "matrix"}
    report = tnlib_adapters.compress(folders[name], tmp_path / "out", **by_options(**options))
    assert (report.matrices[-1].role, report.matrices[-1].kind) == ("embedding", "low_rank")
    tnlib_adapters.compress(folders[name], tmp_path / "dense", **by_options(layout="dense", **options))
    tokens = inputs(model)
    wanted = outputs(loaded_like(model, tmp_path / "dense"), tokens)
    small = loaded_like(model, tmp_path / "out")
    close(outputs(small, tokens), wanted)
    dense = small.dequantize()
    close(outputs(dense, tokens), wanted)
    assert dense.get_output_embeddings().weight is dense.get_input_embeddings().weight

    report = tnlib_adapters.compress(
        folders[name], tmp_path / "text", **by_options(keep=0.12, calibrate=text, what="all")
    )
    assert report.left_dense == {
        "embeddings.word_embeddings": "it also predicts masked tokens, which calibration does not run"
    }
    assert all(matrix.role == "feed-forward" for matrix in report.matrices)
    before, after = (open_checkpoint(folder) for folder in (folders[name], tmp_path / "text"))
    table = before.wiring.embedding.table.weight
    np.testing.assert_array_equal(after.read(table), before.read(table))


def test_two_tables_that_config_json_ties_stay(tmp_path: Path) -> None:
    folder = save_with_tokenizer(random_model("llama"), tmp_path / "in")
    change_config(folder, tie_word_embeddings=True)
    report = tnlib_adapters.compress(folder, tmp_path / "out", Budget(keep=0.5), what="all", method="matrix")
    assert set(report.left_dense) == {"embed_tokens", "lm_head"}
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    report = tnlib_adapters.compress(folder, tmp_path / "one", Budget(keep=0.12), what="all", method="matrix")
    assert report.left_dense == {}
    assert report.matrices[-1].role == "embedding and unembedding"
    assert "embed_tokens" in read_config(tmp_path / "one")["quantization_config"]["modules"]


def test_attention_and_mlp_have_no_tables(folders: Any, tmp_path: Path) -> None:
    for what in ("attention", "mlp"):
        report = tnlib_adapters.compress(
            folders["llama"], tmp_path / what, Budget(keep=0.5), what=what, method="matrix"
        )
        assert {matrix.role for matrix in report.matrices} == ({"feed-forward"} if what == "mlp" else set())
        assert report.left_dense == {}


# --------------------------------------------------------------------------------------------------- the components


def test_a_sum_of_kronecker_products_has_a_nearest_one() -> None:
    rng = np.random.default_rng(0)
    a, b, c, d = (x.T @ x for x in rng.standard_normal((4, 9, 5)))
    left, right = nearest_kronecker_product([(a, b), (c, d)])
    u, s, vh = np.linalg.svd(np.outer(a, b) + np.outer(c, d))
    wanted = s[0] * np.outer(u[:, 0], vh[0])
    found = np.outer(left, right)
    np.testing.assert_allclose(found / np.linalg.norm(found), wanted / np.linalg.norm(wanted), atol=1e-12)
    assert np.linalg.eigvalsh(left).min() > 0
    assert np.linalg.eigvalsh(right).min() > 0


def test_components_of_an_unembedding_are_those_of_a_matrix() -> None:
    """Gradients at its input say as much as those at its output, which are as wide as the vocabulary."""
    rng = np.random.default_rng(1)
    w, x, p = rng.standard_normal((6, 30)), rng.standard_normal((80, 6)), rng.standard_normal((90, 30))
    table = table_components(w.T, [((p @ w.T).T @ (p @ w.T), x.T @ x)])
    whole = components(w, x.T @ x, p.T @ p)
    for rank in (1, 4):
        found = table.left[:, :rank] @ table.right[:rank]
        np.testing.assert_allclose(found.T, whole.left[:, :rank] @ whole.right[:rank], atol=1e-7)
    total = rounding_loss(w, x.T @ x, p.T @ p)
    np.testing.assert_allclose(table.losses, total * whole.losses, rtol=1e-7, atol=1e-9 * total)


def test_losses_of_a_table_are_those_of_all_its_uses() -> None:
    """Each component left out: the error of look-ups and that of predictions, computed row by row."""
    rng = np.random.default_rng(4)
    weight, p, x, g = (rng.standard_normal(shape) for shape in ((30, 5), (50, 5), (60, 5), (70, 5)))
    counts = rng.integers(0, 9, 30).astype(float)
    table = table_components(weight, [(moments_of_rows(weight, counts), p.T @ p), (g.T @ g, x.T @ x)])
    for c, loss in enumerate(table.losses):
        missing = np.outer(table.left[:, c], table.right[c])
        in_width = np.linalg.lstsq(weight, missing, rcond=None)[0]  # width, as missing = weight @ in_width
        wanted = np.sum(counts[:, None] * (missing @ p.T) ** 2) + np.sum((g @ in_width @ x.T) ** 2)
        assert loss == pytest.approx(wanted, rel=1e-6)


def test_a_large_table_is_decomposed_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    weight, p = rng.standard_normal((50, 6)).astype(np.float32), rng.standard_normal((90, 6))
    counts, slopes = rng.integers(0, 9, 50).astype(np.float32), (p.T @ p).astype(np.float32)
    small, looked_up = components(weight, counts, slopes), moments_of_rows(weight, counts)
    monkeypatch.setattr(components_module, "LARGE_TABLE", 1)
    large = components(weight, counts, slopes)
    assert large.left.dtype == large.right.dtype == np.float32
    np.testing.assert_allclose(moments_of_rows(weight, counts), looked_up, rtol=1e-5)
    np.testing.assert_allclose(large.losses, small.losses, atol=1e-6)
    for rank in (1, 3, 6):
        found, wanted = (own.left[:, :rank] @ own.right[:rank] for own in (large, small))
        np.testing.assert_allclose(found, wanted, atol=1e-3)
