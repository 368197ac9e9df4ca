"""Divergence and perplexity of two models, beside the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tnlib_adapters import Budget, Evaluation, builtin_path, compress, evaluate  # noqa: E402
from tnlib_adapters.compression.report import show_evaluation  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")


def logs_of(folder: Path, ids: np.ndarray) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].double().log_softmax(-1)


@pytest.mark.slow
def test_divergence_is_that_of_the_compressed_from_the_original_over_predicted_tokens(tmp_path: Path) -> None:
    """Windows of different lengths are padded; the padding and the first token of each do not count."""
    source, out, text = builtin_path("llama"), tmp_path / "out", tmp_path / "text.txt"
    compress(source, out, Budget(store="int2"), what="mlp", layout="dense")
    words = "The list is sorted in place. If the argument is a string, it is parsed as a path, and opened. " * 9
    text.write_text(words.strip(), encoding="utf-8")
    ids = np.array(transformers.AutoTokenizer.from_pretrained(source)(words.strip())["input_ids"])
    forward = backward = loss = n = 0.0
    windows = [ids[start : start + 256] for start in range(0, len(ids), 256)]
    assert len({len(window) for window in windows}) > 1
    for window in windows:
        before, after = (logs_of(folder, window)[:-1] for folder in (source, out))
        forward += float((before.exp() * (before - after)).sum())
        backward += float((after.exp() * (after - before)).sum())
        loss -= float(before[np.arange(len(window) - 1), window[1:]].sum())
        n += len(window) - 1
    assert forward != pytest.approx(backward, rel=0.01), "the test would not notice an exchange of both"
    found = evaluate(source, out, text)
    assert found.divergence == pytest.approx(forward / n, rel=1e-4)
    assert found.perplexity_before == pytest.approx(np.exp(loss / n), rel=1e-4)


@pytest.mark.parametrize(
    ("n_tokens", "cosine", "is_short"),
    [(9, None, True), (1999, None, True), (2000, None, False), (9, np.ones(1), False)],
)
def test_a_short_text_is_named(n_tokens: int, cosine: Any, is_short: bool, capsys: Any) -> None:
    show_evaluation(Evaluation(1, n_tokens, cosine, 80.0, 90.0, 0.1))
    assert ("a short text: measures of fewer than 2,000 tokens" in capsys.readouterr().out) == is_short
