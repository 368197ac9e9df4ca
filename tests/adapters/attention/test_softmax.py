"""Softmax and its logarithm keep the accuracy of their dtype in any memory order."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special
from tnlib_adapters.attention.softmax import log_softmax, softmax


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_large_logit_beside_a_vocabulary(dtype: type, order: str) -> None:
    """The sum of 50,000 small terms and a large one; scipy in double precision is the reference."""
    logits = 2 * np.random.default_rng(0).standard_normal((4, 49_152))
    logits[:, 0] = 20
    logits = np.asarray(logits, dtype, order=order)  # type: ignore[call-overload]
    eps = np.finfo(dtype).eps
    expected = logits.astype(np.float64)
    assert np.abs(log_softmax(logits) - special.log_softmax(expected, axis=-1)).max() <= 16 * eps * 20
    assert np.abs(softmax(logits) / special.softmax(expected, axis=-1) - 1).max() <= 64 * eps
    assert log_softmax(logits).dtype == softmax(logits).dtype == dtype
