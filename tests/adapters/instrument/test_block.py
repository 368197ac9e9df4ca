"""A block with other weights: factors applied one after the other compute what their products do."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from tnlib_adapters.compression.calibration.calibrate import with_bias_row  # noqa: E402
from tnlib_adapters.factors.projections import NAMES, Products  # noqa: E402
from tnlib_adapters.instrument.block import Block, FactoredMap, as_tensor  # noqa: E402
from tnlib_adapters.instrument.block_passes import OuterLayers, run_block  # noqa: E402
from tnlib_adapters.instrument.running_model import RunningModel, open_running  # noqa: E402
from transformers_models import made_up_text  # noqa: E402


def halved(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of half the rank."""
    u, s, vt = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    rank = max(1, len(s) // 2)
    return u[:, :rank] * s[:rank], vt[:rank]


def truncated(model: RunningModel, checkpoint, k: int) -> Products:
    """Return factors of all weights of a block, with gradients."""
    projections, layer = checkpoint.projections(k), model.wiring.layers[k]
    in_rows = {name: bias for name, bias in projections.biases.items() if name != "o"}
    factors = {name: halved(with_bias_row(projections.weights[name], in_rows.get(name))) for name in NAMES}
    for matrix in layer.feed_forward_matrices:
        factors[matrix.name] = halved(matrix.on_rows(checkpoint.read(matrix.weight)))
    tensors = {
        name: tuple(as_tensor(a, model.device).requires_grad_() for a in parts) for name, parts in factors.items()
    }
    others = {"o": as_tensor(projections.biases["o"], model.device)} if "o" in projections.biases else {}
    return Products(tensors, frozenset(in_rows), others)


@pytest.mark.parametrize(
    ("name", "n_apart"), [("llama", 7), ("llama_biases", 7), ("bert", 6), ("gpt2_lm", 3), ("phi3", 3), ("gptj", 6)]
)
def test_factors_one_after_the_other_compute_what_their_products_do(folders, name, n_apart):
    outs, gradients = [], []
    for max_weights in (None, 0):  # the second model does not fit in memory
        model = open_running(folders[name], max_weights=max_weights)
        batch = model.batches(made_up_text(8))[-1]
        with torch.no_grad():
            x, calls = OuterLayers(model).enter(batch)
            model.load(1)
            own = run_block(model, 1, x, calls[1])
        block, products = Block(model, 1), truncated(model, open_checkpoint(folders[name]), 1)
        weights = block.weights(products)
        n_maps = sum(isinstance(value, FactoredMap) for value in weights.values())
        assert n_maps == (0 if max_weights is None else n_apart)
        out = block.run(x, calls[1], weights)
        out.square().sum().backward()
        outs.append(out.detach())
        gradients.append([part.grad for parts in products.factors.values() for part in parts])
        torch.testing.assert_close(block.run(x, calls[1]), own)  # the block has its own weights again
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
