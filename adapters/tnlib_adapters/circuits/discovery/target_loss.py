"""Loss on target tokens, cross-entropy, KL divergence or any function, and its gradients by torch.

The forward passes of `reference` and of `AttentionWeights` accept tensors of torch as the stream: what torch
differentiates is the numpy forward pass itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib_adapters.attention.softmax import like, log_softmax
from tnlib_adapters.reference.layers import Norm, Unembedding, normed
from tnlib_adapters.reference.model import check_mask
from tnlib_adapters.reference.weights import Weights, as_unembedding

Metric = Literal["loss", "kl"] | Callable[[Array, Array], Any]


@dataclass(frozen=True, eq=False)
class LogitDifference:
    """Mean logit of other tokens less that of the target tokens, a metric of `Ablation`: lower is better, as of a loss.

    Parameters
    ----------
    others
        (targets,), integers: the wrong answer beside every target token, in the order of the mask.

    Examples
    --------
    >>> import numpy as np
    >>> float(LogitDifference([1, 1])(np.array([[3.0, 1.0], [2.0, 4.0]]), np.array([0, 0])))
    0.0
    """

    others: Any

    def __call__(self, logits: Array, targets: Array) -> Any:
        """Return the metric for logits (targets, vocab), of numpy or torch, and target tokens (targets,)."""
        others = np.asarray(self.others)
        if others.shape != targets.shape or others.dtype.kind not in "iu":
            raise ArgumentError(
                f"LogitDifference: others must be one token for each of {len(targets)} targets, got "
                f"{others.dtype} of shape {others.shape}; pass them in the order of the mask."
            )
        rows = np.arange(len(targets))
        return (logits[rows, others] - logits[rows, targets]).mean()


def metric_name(metric: Metric) -> str:
    """Return the name of a metric for a table."""
    if isinstance(metric, str):
        return {"loss": "loss", "kl": "KL divergence"}[metric]
    name: str = getattr(metric, "__name__", type(metric).__name__)
    return name


def differentiated(function: Callable[[Array], Array], x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Return function(x), and its vector-Jacobian product: from the gradient of a loss by function(x) to that by x.

    Raises
    ------
    ModuleNotFoundError
        If torch is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([1.0, 3.0])
    >>> value, pull_back = differentiated(lambda x: x**2, x)  # doctest: +SKIP
    >>> value, pull_back(np.ones(2))  # doctest: +SKIP
    (array([1., 9.]), array([2., 6.]))
    """
    torch = import_optional("the gradient of a circuit", "torch", "torch")
    from tnlib_adapters.attention.tensor_product import as_tensor

    at: Any = as_tensor(x).requires_grad_()
    value: Any = function(at)

    def pull_back(grad: Array) -> Array:
        gradient: Array = torch.autograd.grad(value, at, torch.asarray(grad))[0].numpy()
        return gradient

    return value.detach().numpy(), pull_back


@dataclass(frozen=True, eq=False)
class Targets:
    """Tokens (b, n), a mask of target tokens, and the map from the final stream to logits.

    Without `reference` the loss is the mean cross-entropy of the targets, in nats. With `reference` (t, vocab),
    log-probabilities, it is the mean KL divergence of the predictions from them; with `metric` that function of the
    logits (t, vocab) and of the targets (t,).
    """

    tokens: Array
    counted: Array
    unembed: Unembedding
    final_norm: Norm | None = None
    reference: Array | None = None
    metric: Callable[[Array, Array], Any] | None = None

    @property
    def at(self) -> Array:
        """Positions whose next token is a target, (b, n)."""
        return np.roll(self.counted, -1, axis=1)

    def loss(self, stream: Array) -> float:
        """Return the loss of a final stream (b, n, d)."""
        return self.loss_of_rows(stream[self.at])

    def loss_of_rows(self, rows: Array) -> float:
        """Return the loss of the target rows (t, d) alone."""
        return float(self._loss(rows))

    def _loss(self, rows: Array) -> Array:
        if self.metric is not None:
            of_logits: Array = self.metric(self.unembed(normed(self.final_norm, rows)), self.tokens[self.counted])
            return of_logits
        log_p = self.log_probabilities(rows)
        if self.reference is None:
            actual = self.tokens[self.counted]  # t, in the order of `at`
            return -log_p[np.arange(len(actual)), actual].mean()  # type: ignore[no-any-return]
        reference = like(self.reference, log_p)
        divergences: Array = like(np.exp(self.reference), log_p) * (reference - log_p)
        return divergences.sum() / len(log_p)  # type: ignore[no-any-return]

    def losses_of_rows(self, rows: Array, actual: Array) -> Array:
        """Return the cross-entropy of tokens (t,) as predicted by rows (t, d) of the final stream, (t,)."""
        return self.unembed.cross_entropies(normed(self.final_norm, rows), actual)

    def log_probabilities(self, rows: Array) -> Array:
        """Return the log-probabilities of the predictions of target rows (t, d), (t, vocab)."""
        return log_softmax(self.unembed(normed(self.final_norm, rows)))

    def compared_with(self, stream: Array) -> Targets:
        """Return the same targets with the KL divergence from the predictions of a final stream (b, n, d)."""
        return replace(self, reference=self.log_probabilities(stream[self.at]))

    def slope(self, stream: Array) -> Array:
        """Return the gradient of the loss with respect to the final stream, (b, n, d)."""
        out = np.zeros_like(stream)
        out[self.at] = self.slope_of_rows(stream[self.at])
        return out

    def slope_of_rows(self, rows: Array) -> Array:
        """Return the gradient of the loss with respect to the target rows, (t, d)."""
        return differentiated(self._loss, rows)[1](np.ones((), rows.dtype))


def targets_of(weights: Weights, tokens: Any, mask: Array | None, function: str, metric: Metric = "loss") -> Targets:
    """Return the targets for tokens and mask, validated; a metric that is a function is tried on logits of zero."""
    unembed = as_unembedding(function, weights)
    tokens = weights.embedding.check(function, tokens, weights.context)
    targets = Targets(tokens, check_mask(function, mask, tokens), unembed, weights.final_norm)
    if not callable(metric):
        return targets
    actual = tokens[targets.counted]
    value = metric(np.zeros((len(actual), unembed.affine.weight.shape[1])), actual)
    if np.ndim(value) or not np.isfinite(value):
        raise ArgumentError(
            f"{function}: metric must return a finite number for logits (targets, vocab) and targets (targets,), "
            f"got {value!r:.80} for zeros; pass for example LogitDifference(others)."
        )
    return replace(targets, metric=metric)
