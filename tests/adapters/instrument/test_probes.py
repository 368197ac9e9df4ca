"""Random probes of predictions: tokens drawn by their probabilities."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters.instrument.weight_inputs import draw_tokens  # noqa: E402

DRAWS = 40_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("p", [(0.5, 0.5), (0.0, 0.9, 0.0, 0.1, 0.0), (1.0,), (0.2, 0.3, 0.05, 0.45)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_tokens_come_as_often_as_their_probabilities_say(p, scale):
    """Within five standard deviations; what has no probability never. What they sum to is of no account."""
    expected = torch.tensor(p)
    drawn = draw_tokens((scale * expected).expand(4, DRAWS // 4, -1), generator())
    assert drawn.shape == (4, DRAWS // 4, 1)
    found = torch.bincount(drawn.flatten(), minlength=len(p)) / DRAWS
    assert (found - expected).abs().le(5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


def test_every_row_is_drawn_by_its_own_probabilities():
    certain = torch.eye(7)[torch.tensor([[3, 0, 6], [1, 1, 5]])]  # texts tokens vocabulary
    assert draw_tokens(certain, generator()).flatten().tolist() == [3, 0, 6, 1, 1, 5]


def test_large_vocabularies_keep_their_tail():
    """Half of the probability on one token, the rest spread thin: the thin half is drawn half of the time, evenly."""
    size = 50_001
    p = torch.full((size,), 0.5 / (size - 1))
    p[0] = 0.5
    drawn = draw_tokens(p.expand(1_000, -1), generator(1)).flatten()
    thin = drawn[drawn > 0].double()
    assert abs(len(thin) / 1_000 - 0.5) <= 5 * 0.5 / 1_000**0.5
    assert abs(float(thin.mean()) / size - 0.5) <= 5 * (1 / 12) ** 0.5 / len(thin) ** 0.5
