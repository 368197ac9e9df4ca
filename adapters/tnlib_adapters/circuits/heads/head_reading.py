"""Report on one head: singular features in tokens, maximal scores, and copying scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._validate import as_count
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.arguments import check_form
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.heads.bilinear_maximum import Maximum, form_maximum
from tnlib_adapters.circuits.heads.effective_head import stream_head
from tnlib_adapters.circuits.heads.singular_features import Features, singular_features
from tnlib_adapters.circuits.tokens.copying_scores import Copying, circuit_copying
from tnlib_adapters.circuits.tokens.embeddings import as_vocabulary
from tnlib_adapters.circuits.tokens.token_features import Side, TokenFeature, read_tokens
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary

_DRAWN = 2048  # tokens sampled for copying accuracy: standard error 0.011


@dataclass(frozen=True, eq=False, repr=False)
class HeadReading:
    """Report on one head, returned by `read_head` and printed as a page.

    Parameters
    ----------
    layer, head
        Indices of layer and head.
    distance
        Query position minus key position of the scores; None where scores do not depend on it.
    qk, ov
        `Features` of Omega and of OV, all singular values.
    qk_tokens, ov_tokens
        The leading ones in tokens. Left and right vectors of QK are queries and keys; of OV, inputs and outputs.
    maximum
        Maxima of Omega over unit vectors, biases included.
    copying
        Copying scores; None if the model has no unembedding.
    vocabulary
        Token names.
    notes
        Sentences on omitted parts of the model.
    """

    layer: int
    head: int
    distance: int | None
    qk: Features
    ov: Features
    qk_tokens: list[TokenFeature]
    ov_tokens: list[TokenFeature]
    maximum: Maximum
    copying: Copying | None
    vocabulary: Vocabulary
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        at = "" if self.distance is None else f" at distance {self.distance}"
        lines = [f"head {self.layer}.{self.head}", f"QK{at}: {self.maximum!r}"]
        lines += self._lines(self.qk_tokens, ("queries", "keys"))
        lines.append(f"OV: {self.ov!r}" if self.copying is None else f"OV: {self.copying!r}")
        lines += self._lines(self.ov_tokens, ("reads", "writes"))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _lines(self, features: list[TokenFeature], sides: tuple[str, str]) -> list[str]:
        lines = []
        for feature in features:
            start, stop = feature.number.start, feature.number.stop
            number = str(start + 1) if stop - start == 1 else f"{start + 1}-{stop}"
            for sign in ("+", "-") if feature.left.negative else ("span",):
                value = "" if sign == "-" else f"{number:>5}{feature.value:>10.4g}"
                ends = (
                    self._end(side, sign, name) for side, name in zip((feature.left, feature.right), sides, strict=True)
                )
                lines.append(f"{value:15} {sign:4} " + "   ".join(ends))
        return lines

    def _end(self, side: Side, sign: str, name: str) -> str:
        end = side.negative if sign == "-" else side.positive
        shares = {"positions": side.by_position or 0.0, "bias": side.constant}
        remarks = ", ".join(
            f"{source} {share:.0%}" for source, share in shares.items() if share >= 0.005 and sign != "-"
        )
        return (f"{name} ({remarks}): " if remarks else f"{name}: ") + " ".join(
            self.vocabulary.name(token) for token, _ in end
        )


@single_threaded_blas
def read_head(
    model: Checkpoint,
    layer: int,
    head: int,
    *,
    distance: int | None = None,
    features: int = 3,
    tokens: int = 5,
    vocabulary: Vocabulary | None = None,
) -> HeadReading:
    """Return the singular features of a head in tokens, with the adjacent norms folded in.

    Parameters
    ----------
    model
        A checkpoint of a model that reads tokens; only the weights of this head and the two embeddings are loaded.
    layer, head
        Indices, from 0.
    distance
        Query position minus key position. Required where scores depend on it (rotary embeddings, ALiBi).
    features, tokens
        Number of features to print in tokens, and number of tokens at each of their ends.
    vocabulary
        Result of `read_vocabulary(model)`; reuse it for several heads.

    Returns
    -------
    HeadReading
        Printed as a page. Top-k copying accuracy is measured on at most 2048 randomly sampled tokens.

    Raises
    ------
    ArgumentError
        If there is no such head, or the distance is missing.

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = read_head(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), 1, 2)
    >>> found.copying.score > 0.99, found.copying.accuracy(1) > 0.5
    (True, True)
    >>> len(found.qk), found.maximum.value > found.maximum.symmetric
    (16, True)
    """
    count, ends = as_count("read_head", "features", features), as_count("read_head", "tokens", tokens)
    effective = stream_head("read_head", model, layer, head)
    check_form("read_head", effective.attention, distance)
    omega, written = effective.attention.qk(0, distance), effective.attention.ov(0)
    words = as_vocabulary("read_head", model, vocabulary)
    qk, ov = (singular_features(operator) for operator in (omega, written))
    chosen = np.sort(np.random.default_rng(0).permutation(len(words))[:_DRAWN])
    return HeadReading(
        layer=int(layer) % model.n_layers,
        head=int(head) % model.sizes.n_heads,
        distance=distance,
        qk=qk,
        ov=ov,
        qk_tokens=read_tokens(qk, words, effective.norm, writes=False, count=count, tokens=ends),
        ov_tokens=read_tokens(ov, words, effective.norm, writes=True, count=count, tokens=ends),
        maximum=form_maximum(omega),
        copying=circuit_copying(effective, words, chosen) if words.ends_in_logits else None,
        vocabulary=words,
        notes=(*effective.notes, *words.notes),
    )
