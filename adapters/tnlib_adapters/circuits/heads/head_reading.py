"""Report on one head: singular vectors in tokens, maximal scores, and copying scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, check_form
from tnlib_adapters.circuits.effective_head import stream_head
from tnlib_adapters.circuits.heads.singular_vectors import Maximum, SingularVectors, form_maximum, singular_vectors
from tnlib_adapters.circuits.tokens.copying import Copying, circuit_copying
from tnlib_adapters.circuits.tokens.vocabulary import Inputs, Vocabulary, as_vocabulary
from tnlib_adapters.reference.layers import Norm

TokenCoordinates = tuple[tuple[int, float], ...]  # token number, coordinate along the direction
_DRAWN = 2048  # tokens sampled for copying accuracy: standard error 0.011


@dataclass(frozen=True)
class VectorSide:
    """One side of a pair of singular vectors in tokens, sorted by coordinate.

    Parameters
    ----------
    positive, negative
        Tokens with the largest and the smallest coordinate along the direction. For a span, whose basis is arbitrary,
        `positive` holds the tokens with the longest projection and `negative` is empty.
    constant
        Share of the squared length on the constant coordinate (biases); 0 on an output side.
    by_position
        Share of learned positions in the variance of the coordinates over tokens and positions. Near 1 the direction
        encodes position, and its tokens mean little. None on an output side, and without learned positions.

    Examples
    --------
    Queries of the previous-token head encode their position:

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = read_head(model, 0, 3).qk_tokens[0].left
    >>> f"{found.by_position:.2f}, {found.constant:.2f} constant"
    '1.00, 0.02 constant'
    """

    positive: TokenCoordinates
    negative: TokenCoordinates
    constant: float
    by_position: float | None


@dataclass(frozen=True, eq=False, repr=False)
class TokenVectors:
    """A pair of singular directions, or of spans, in tokens.

    Parameters
    ----------
    number
        Index, or range of indices, of the singular values.
    value
        The singular value; for a span the largest.
    left, right
        Query and key side, or input and output side. `left.positive` belongs to `right.positive`, negative to negative;
        only the common sign of the two is arbitrary.

    Examples
    --------
    A copying head raises the logits of the tokens that it reads:

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = read_head(model, 1, 2).ov_tokens[0]
    >>> (
    ...     f"{found.value:.1f}",
    ...     [token for token, _ in found.left.negative],
    ...     [token for token, _ in found.right.negative],
    ... )
    ('8.9', [64, 40, 105, 19, 104], [64, 40, 105, 19, 104])
    """

    number: slice
    value: float
    left: VectorSide
    right: VectorSide


def vectors_in_tokens(
    vectors: SingularVectors, vocabulary: Vocabulary, norm: Norm | None, *, writes: bool, count: int, tokens: int
) -> list[TokenVectors]:
    """Return the first `count` pairs with `tokens` tokens per end; `writes` marks the right side as an output."""
    groups = vectors.groups[:count]
    n = groups[-1].stop if groups else 0
    columns, rows = vectors.left[:, :n], vectors.right[:n]
    left = _coordinates(vocabulary, columns, norm)
    right = (vocabulary.write(rows[:, :-1]).T, None) if writes else _coordinates(vocabulary, rows.T, norm)
    return [
        TokenVectors(
            number=group,
            value=float(vectors.values[group.start]),
            left=_side(*left, group, columns[-1], tokens),
            right=_side(*right, group, rows[:, -1], tokens),
        )
        for group in groups
    ]


def _coordinates(vocabulary: Vocabulary, columns: Array, norm: Norm | None) -> tuple[Array, Array | None]:
    """Return token coordinates along columns (vocab, r), and variances over positions and tokens (2, r)."""
    along = vocabulary.read(columns, norm)
    if vocabulary.positions is None:
        return along, None
    token_variance, position_variance = (
        np.var(a, axis=0) for a in vocabulary.read_by_source(columns, norm) if a is not None
    )
    return along, np.stack([position_variance, token_variance])


def _side(of_tokens: Array, variances: Array | None, group: slice, constants: Array, count: int) -> VectorSide:
    along = of_tokens[:, group]
    constant = float(np.square(constants[group]).mean())
    by_position = None
    if variances is not None:
        position_variance, token_variance = variances[:, group].sum(axis=1)
        by_position = float(position_variance / ((position_variance + token_variance) or 1))
    if along.shape[1] > 1:
        return VectorSide(_top(np.linalg.norm(along, axis=1), count), (), constant, by_position)
    lowest = tuple((token, -size) for token, size in _top(-along[:, 0], count))
    return VectorSide(_top(along[:, 0], count), lowest, constant, by_position)


def _top(sizes: Array, count: int) -> TokenCoordinates:
    count = min(count, len(sizes))
    near = np.argpartition(-sizes, count - 1)[:count]
    order = near[np.argsort(-sizes[near], kind="stable")]
    return tuple((int(token), float(sizes[token])) for token in order)


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
        `SingularVectors` of Omega and of OV, all singular values.
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

    References
    ----------
    B. Millidge, S. Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable"
    (2022).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = read_head(model, 1, 2)
    >>> found.copying
    Copying(score 1.000, top 1 0.664, top 5 0.758, of embeddings)
    >>> len(found.ov), len(found.ov_tokens)  # the leading ones are given in tokens
    (16, 3)
    """

    layer: int
    head: int
    distance: int | None
    qk: SingularVectors
    ov: SingularVectors
    qk_tokens: list[TokenVectors]
    ov_tokens: list[TokenVectors]
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

    def _lines(self, pairs: list[TokenVectors], sides: tuple[str, str]) -> list[str]:
        lines = []
        for pair in pairs:
            start, stop = pair.number.start, pair.number.stop
            number = str(start + 1) if stop - start == 1 else f"{start + 1}-{stop}"
            for sign in ("+", "-") if pair.left.negative else ("span",):
                value = "" if sign == "-" else f"{number:>5}{pair.value:>10.4g}"
                ends = (self._end(side, sign, name) for side, name in zip((pair.left, pair.right), sides, strict=True))
                lines.append(f"{value:15} {sign:4} " + "   ".join(ends))
        return lines

    def _end(self, side: VectorSide, sign: str, name: str) -> str:
        end = side.negative if sign == "-" else side.positive
        shares = {"positions": side.by_position or 0.0, "bias": side.constant}
        remarks = [f"{source} {share:.0%}" for source, share in shares.items() if share >= 0.005 and sign != "-"]
        heading = f"{name} ({', '.join(remarks)}): " if remarks else f"{name}: "
        return heading + " ".join(self.vocabulary.name(token) for token, _ in end)


@accepts_models
@single_threaded_blas
def read_head(
    model: Checkpoint,
    layer: int,
    head: int,
    *,
    distance: int | None = None,
    n_vectors: int = 3,
    tokens: int = 5,
    inputs: Inputs | Vocabulary = "embeddings",
) -> HeadReading:
    """Return the singular vectors of a head in tokens, with the adjacent norms folded in.

    Parameters
    ----------
    model
        A checkpoint or transformers model that reads tokens; only the weights of this head and the two embeddings are
        loaded.
    layer, head
        Indices, from 0.
    distance
        Query position minus key position. Required where scores depend on it (rotary embeddings, ALiBi).
    n_vectors, tokens
        Number of pairs of singular vectors to print in tokens, and number of tokens at each of their ends.
    inputs
        What the head reads for a token: "embeddings" or "first layer", see `read_vocabulary`, or its result, which
        serves several heads.

    Returns
    -------
    HeadReading
        Printed as a page. Top-k copying accuracy is measured on at most 2048 randomly sampled tokens.

    Raises
    ------
    ArgumentError
        If there is no such head, or the distance is missing.

    References
    ----------
    B. Millidge, S. Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable"
    (2022).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = read_head(model, 1, 2)
    >>> found.copying.score > 0.99, found.copying.accuracy(1) > 0.5
    (True, True)
    >>> len(found.qk), found.maximum.value > found.maximum.symmetric
    (16, True)
    """
    count, ends = as_count("read_head", "n_vectors", n_vectors), as_count("read_head", "tokens", tokens)
    effective = stream_head("read_head", model, layer, head)
    check_form("read_head", effective.attention, distance)
    omega, written = effective.attention.qk(0, distance), effective.attention.ov(0)
    words = as_vocabulary("read_head", model, inputs, "inputs")
    qk, ov = (singular_vectors(operator) for operator in (omega, written))
    chosen = np.sort(np.random.default_rng(0).permutation(len(words))[:_DRAWN])
    return HeadReading(
        layer=int(layer) % model.n_layers,
        head=int(head) % model.sizes.n_heads,
        distance=distance,
        qk=qk,
        ov=ov,
        qk_tokens=vectors_in_tokens(qk, words, effective.norm, writes=False, count=count, tokens=ends),
        ov_tokens=vectors_in_tokens(ov, words, effective.norm, writes=True, count=count, tokens=ends),
        maximum=form_maximum(omega),
        copying=circuit_copying(effective, words, chosen) if words.ends_in_logits else None,
        vocabulary=words,
        notes=(*effective.notes, *words.notes),
    )
