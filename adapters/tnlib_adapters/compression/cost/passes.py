"""Seconds of every stage of a compression, from the passes that it makes and the measured times of their parts.

The unit of a pass is the forward pass of one block over one token. Decompositions are timed by themselves. Compare the
result with measured runs by

    python -m benchmarks.costs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tnlib_adapters.compression.cost.shapes import Shape, Shapes
from tnlib_adapters.compression.request import Request

PROBES = 2  # backward passes of the statistics: moments, then gates
CANDIDATES = {"calibrated": 4, "quantized": 2}  # factors of a block that are compared on held-out batches
STEP = 3.0  # forward passes per token of a step of the fit: forward, backward to inputs, backward to weights
STEP_NUMBERS = {"calibrated": 25, "quantized": 90}  # elementwise operations of a step per number: optimiser, expansion
REFIT = {"calibrated": 2.0, "quantized": 0.0}  # passes through the attention per token: least squares of a factor
HEADS_PER_PROBE = 5.0  # softmaxes of the logits per token and probe: forward, backward, drawing
HEADS_OF_OUTPUT = 1.5  # softmaxes per token of the output of a model: divergences in double precision
EVALUATIONS = 3  # original, compressed, plain int8
DECOMPOSED = 1.1  # decompositions of the weights, with reading, writing and the choice of sizes
OPERATORS = {"heads": 1.0, "other": 0.25}  # measurement of the written weights, in decompositions of the weights
LIBRARIES = 3.0  # seconds to draw the page of the report
LIBRARIES_OF_TEXT = 6.0  # more to load torch, transformers and the model


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text that the stages read, padding included, and those of a step of the fit."""

    statistics: int = 0
    fit: int = 0
    held_out: int = 0
    chosen: int = 0  # of the batches on which factors are chosen
    batch: int = 0
    longest: int = 0  # of one text


@dataclass(frozen=True)
class Times:
    """Measured seconds.

    Parameters
    ----------
    forward, observed, head, elementwise
        As in `BlockTimes`; `timed` is the number of weights of the block that was timed.
    decompositions
        Per weight, by shape.
    layer
        Of the attention of a layer, for methods that factorise it as one.
    load
        Per number of a weight that is read from its file.
    """

    decompositions: Mapping[Shape, float]
    layer: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    observed: float = 0.0
    head: float = 0.0
    elementwise: float = 0.0
    timed: int = 1


def seconds_by_stage(
    shapes: Shapes, request: Request, tokens: Tokens, times: Times, n_steps: int, *, fit_in_memory: bool
) -> dict[str, float]:
    """Return the seconds of every stage.

    Parameters
    ----------
    shapes, request
        The model and the options.
    tokens
        Tokens of the text; all 0 without one.
    times
        Measured times.
    n_steps
        Steps of the fit of a block.
    fit_in_memory
        False if the weights of blocks are read again in every pass.
    """
    passes = _Passes(shapes, request, tokens, times, n_steps, fit_in_memory)
    stages = {"loading": _loading(shapes, request, times), "statistics": passes.statistics}
    stages |= {"factorisation": passes.factorisation, "fit": passes.fit, "measurement": passes.measurement}
    return {name: seconds for name, seconds in stages.items() if seconds}


def _loading(shapes: Shapes, request: Request, times: Times) -> float:
    read = times.load * shapes.n_parameters
    return LIBRARIES + read + (LIBRARIES_OF_TEXT if request.calibrate is not None else 0.0)


@dataclass(frozen=True)
class _Passes:
    shapes: Shapes
    request: Request
    tokens: Tokens
    times: Times
    n_steps: int
    fit_in_memory: bool

    @property
    def model(self) -> float:
        """Seconds per token of a forward pass of all blocks."""
        return self.times.forward * self._scale

    @property
    def statistics(self) -> float:
        t, shapes, times = self.tokens, self.shapes, self.times
        if not self.request.fits_model:  # input moments alone, in one forward pass
            return t.statistics * (self.model + times.head + self._multiply * self._moments(with_slopes=False))
        streams = t.fit * self.model
        observed = PROBES * t.statistics * times.observed * self._scale
        moments = t.statistics * self._multiply * self._moments(with_slopes=True)
        # the derivative with respect to a gate is the product of both sides of its component
        gates = t.statistics * self._multiply * sum((m + n) * min(m, n) for m, n in shapes.all_weights())
        ends = PROBES * (2 if shapes.tables else 1) * HEADS_PER_PROBE * t.statistics * times.head
        return streams + observed + moments + gates + ends + self._loads(1 + PROBES)

    @property
    def factorisation(self) -> float:
        shapes, times = self.shapes, self.times
        by_layer = times.layer > 0
        single = [
            shape
            for k in range(len(shapes.blocks))
            for shape in (shapes.matrices[k] if by_layer else shapes.of_block(k))
        ]
        weights = [*single, *shapes.tables]
        return DECOMPOSED * (sum(times.decompositions[own] for own in weights) + times.layer * len(shapes.layers))

    @property
    def fit(self) -> float:
        if not self.request.fits_model:
            return 0.0
        from tnlib_adapters.instrument.layer_fit import LATER

        method, t, n_blocks = self.request.method, self.tokens, len(self.shapes.blocks)
        total = 0.0
        for k, own in enumerate(self.shapes.blocks):
            weights = self.shapes.of_block(k)
            if not weights:
                continue
            forward = self.times.forward * own / self.times.timed
            numbers = sum(m * n for m, n in weights)
            compressed = forward  # per token of the block with its new weights
            step = STEP_NUMBERS[method] * numbers * self.times.elementwise
            if method == "calibrated" and self.fit_in_memory:  # factors are multiplied out, forward and backward
                step += 3 * self._multiply * sum(m * n * self._rank(m, n) for m, n in weights)
            elif method == "calibrated":
                saved = numbers - sum((m + n) * self._rank(m, n) for m, n in weights)
                compressed = max(forward / 4, forward - self._multiply * saved)
            step += STEP * t.batch * compressed
            own_of_attention = sum(m * n for m, n in self.shapes.projections.values()) / own
            refit = REFIT[method] * own_of_attention * t.fit * forward
            later = min(n_blocks - k, 1 + LATER) * self.times.forward * self._scale / n_blocks
            chosen = t.chosen * CANDIDATES[method] * later
            if n_blocks - k <= LATER:  # by the output of the model, otherwise by a stream
                chosen += t.chosen * (1 + CANDIDATES[method]) * 1.5 * self.times.head
            total += self.n_steps * step + refit + t.fit * compressed + chosen
        return total + self._loads(1 + min(n_blocks / 2, LATER))

    @property
    def measurement(self) -> float:
        t, times = self.tokens, self.times
        kind = "heads" if self.request.method == "heads" else "other"
        operators = 0.0 if t.held_out else OPERATORS[kind] * self.factorisation
        if not t.held_out:
            return operators
        runs = EVALUATIONS * t.held_out * (self.model + HEADS_OF_OUTPUT * times.head)
        return operators + runs + self._loads(EVALUATIONS)

    @property
    def _scale(self) -> float:
        """Blocks of the model, in blocks of the size that was timed."""
        return sum(self.shapes.blocks) / self.times.timed

    @property
    def _multiply(self) -> float:
        """Seconds of one multiplication in a product of matrices."""
        return self.times.forward / self.times.timed

    def _moments(self, *, with_slopes: bool) -> float:
        """Multiplications per token of all second moments, of which half is computed."""
        return sum(n**2 for k in range(len(self.shapes.blocks)) for n in moment_widths(self.shapes, k, with_slopes)) / 2

    def _rank(self, m: int, n: int) -> int:
        """Rank at the requested fraction of the numbers, without those of the gauge."""
        keep = 0.5 if self.request.keep is None else self.request.keep
        return int(min(m, n) * (1 - (1 - min(1.0, keep)) ** 0.5))

    def _loads(self, n_times: float) -> float:
        return 0.0 if self.fit_in_memory else self.times.load * n_times * sum(self.shapes.blocks)


def moment_widths(shapes: Shapes, k: int, with_slopes: bool) -> list[int]:
    """Return the widths of the second moments of a block, of its inputs and of the gradients at its outputs."""
    projections = shapes.projections if k in shapes.layers else {}
    inputs = [projections["q"][0] + 1, projections["o"][0]] if projections else []
    outputs = [n for _, n in projections.values()]
    inputs += [m for m, _ in shapes.matrices[k]]
    outputs += [n for _, n in shapes.matrices[k]]
    return inputs + (outputs if with_slopes else [])
