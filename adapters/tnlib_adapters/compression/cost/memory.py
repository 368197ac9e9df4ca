"""Peak memory and temporary files of a compression, from the sizes of the model and the limits that it runs with.

Bytes are those of arrays that are held at the same time, found by reading the code and compared with measured runs by

    python -m benchmarks.costs
"""

from __future__ import annotations

from dataclasses import dataclass

from tnlib_adapters.compression.cost.passes import CANDIDATES, PROBES, Tokens, moment_widths
from tnlib_adapters.compression.cost.shapes import Shape, Shapes
from tnlib_adapters.compression.limits import Limits
from tnlib_adapters.compression.methods.components import is_large, is_large_table
from tnlib_adapters.compression.request import Request

_FLOAT, _DOUBLE = 4, 8
LIBRARIES_OF_TEXT = 1.5e8  # buffers of torch and its threads beside the libraries themselves
LIBRARIES = 1.0e8  # the libraries that draw the page of the report, and those of decompositions
ACTIVATIONS = 3.0  # copies of inputs and outputs of the weights of a block: forward, kept for backward, gradients
LOGITS = {"statistics": 6.0, "fit": 4.0, "measurement": 12.0}  # arrays of logits, in float32
DECOMPOSITION = 3.0  # arrays of a weight in double precision, beside its moments and their roots
ROUNDED = 4.0  # arrays of a weight in double precision while it is rounded, or its factors are packed
SVD = 4.0  # arrays of a weight in its own precision: copy, both factors, workspace


def peak_memory_of(shapes: Shapes, request: Request, tokens: Tokens, limits: Limits, libraries: int) -> dict[str, int]:
    """Return the peak of the resident memory in every stage, in bytes.

    `libraries` is the resident memory before any array is made.
    """
    memory = _Memory(shapes, request, tokens, limits)
    if request.calibrate is None:
        stages = {"factorisation": LIBRARIES + memory.held + memory.decomposition}
    else:
        stages = {
            "statistics": memory.statistics,
            "fit": memory.fit,
            "measurement": memory.measurement,
        }
        stages = {name: LIBRARIES_OF_TEXT + n_bytes for name, n_bytes in stages.items() if n_bytes}
    return {name: int(libraries + n_bytes) for name, n_bytes in stages.items()}


@dataclass(frozen=True)
class _Memory:
    shapes: Shapes
    request: Request
    tokens: Tokens
    limits: Limits

    @property
    def held(self) -> float:
        """Bytes of factors that are not in use."""
        return min(self.limits.cache, factor_bytes(self.shapes, self.request))

    @property
    def fit_in_memory(self) -> bool:
        """True if all weights of the model stay in memory."""
        return _fit_in_memory(self.shapes, self.limits)

    @property
    def weights(self) -> float:
        """Bytes of the weights of a running model while it computes what is before or after its blocks."""
        if self.fit_in_memory:
            return _FLOAT * self.shapes.n_parameters
        return _FLOAT * self.shapes.outside + self._weights_of_blocks

    @property
    def weights_in_block(self) -> float:
        """Bytes of the weights of a running model while it computes a block."""
        return self.weights if self.fit_in_memory else self._weights_of_blocks

    @property
    def _weights_of_blocks(self) -> float:
        return max(self.limits.weights / 2, _FLOAT * max(self.shapes.blocks))

    @property
    def _copies(self) -> int:
        """Copies of the weights of a model and of a changed one, which share those of a model beyond memory."""
        return 2 if self.fit_in_memory else 1

    @property
    def decomposition(self) -> float:
        """Bytes in use while the largest weight is factorised."""
        return max((self._decomposed(shape) for shape in self.shapes.all_weights()), default=0.0)

    @property
    def statistics(self) -> float:
        """Bytes while the statistics of a block are collected, and its weights are factorised."""
        blocks = range(len(self.shapes.blocks))
        of_block = max(self._observed(k) for k in blocks)
        copies = self._copies if self.shapes.layers and self.request.fits_model else 1  # with folded biases
        head = LOGITS["statistics"] * _FLOAT * self.tokens.batch * self.shapes.vocab
        tables = sum(map(_factors, self.shapes.tables)) + max(map(self._decomposed, self.shapes.tables), default=0.0)
        at_tables = tables + (copies * self.weights if self.fit_in_memory else 0.0)  # others are freed before
        return self.held + max(copies * self.weights_in_block + of_block, copies * self.weights + head, at_tables)

    @property
    def fit(self) -> float:
        """Bytes while a block is fitted."""
        if not self.request.fits_model:
            return 0.0
        method, shapes, t = self.request.method, self.shapes, self.tokens
        numbers = max(sum(m * n for m, n in shapes.of_block(k)) for k in range(len(shapes.blocks)))
        # its weights as candidates, and in a step weights, gradients and moments of Adam
        of_block = _FLOAT * numbers * (6 + CANDIDATES[method] / 2)
        weights_in_block = self.weights_in_block
        if method == "calibrated" and not self.fit_in_memory:  # factors alone, which move in place
            of_block, weights_in_block = _FLOAT * numbers * 6 * 1.5 * self._keep, 0.0
        chosen = CANDIDATES[method] * _FLOAT * t.chosen * shapes.width
        head = LOGITS["fit"] * _FLOAT * t.batch * shapes.vocab
        tables = sum(2 * _FLOAT * vocab * width for vocab, width in shapes.tables[:1])  # the truncated embeddings
        copies = self._copies if shapes.tables else 1  # with truncated tables
        in_block = copies * weights_in_block + max(of_block + self._activations(shapes.largest), self._rounded)
        at_end = copies * self.weights + max(of_block / 2 + chosen + head, tables)
        return self.held + max(in_block, at_end)

    @property
    def measurement(self) -> float:
        """Bytes while two models run on the held-out text."""
        n_tokens = min(self.tokens.batch, self.tokens.held_out)
        logits = LOGITS["measurement"] * _FLOAT * n_tokens * self.shapes.vocab
        at_end = 2 * (self.weights if self.fit_in_memory else _FLOAT * self.shapes.outside) + logits
        in_block = 2 * self.weights_in_block + max(self._activations(self.shapes.largest), self._rounded)
        return self.held + max(at_end, in_block)

    @property
    def _rounded(self) -> float:
        """Bytes in use while the largest weight is rounded, or its factors are packed."""
        share = self._keep if self.request.method == "calibrated" else 1.0
        return share * ROUNDED * _DOUBLE * max((m * n for m, n in self.shapes.all_weights()), default=0)

    @property
    def _keep(self) -> float:
        return 0.5 if self.request.keep is None else self.request.keep

    def _decomposed(self, shape: Shape) -> float:
        m, n = max(shape), min(shape)
        if self.request.calibrate is None:
            return SVD * _FLOAT * m * n + 3 * _FLOAT * n * n
        is_table = shape in self.shapes.tables
        if is_table and is_large_table(shape):
            return _FLOAT * DECOMPOSITION * m * n + _DOUBLE * 5 * n * n
        if not is_table and is_large(shape):
            return _FLOAT * (DECOMPOSITION * m * n + m * m + 2 * n * n) + _DOUBLE * 3 * n * n
        return _DOUBLE * (DECOMPOSITION * m * n + 5 * n * n + (0 if is_table else 0.5 * m * m))

    def _observed(self, k: int) -> float:
        """Bytes while the statistics of a block are collected."""
        weights = self.shapes.of_block(k)
        widths = moment_widths(self.shapes, k, with_slopes=self.request.fits_model)
        largest = max((n * n for n in widths), default=0)
        decomposed = max(map(self._decomposed, weights), default=0.0)
        if not self.request.fits_model:
            return _DOUBLE * sum(n * n for n in widths) + max(self._activations(k), decomposed)
        in_passes = sum(_factors(shape) for shape in weights) + max(self._activations(k), decomposed)
        if self.fit_in_memory:
            return in_passes + _FLOAT * (sum(n * n for n in widths) + largest)
        return max(in_passes, 2 * _FLOAT * largest - self.weights_in_block)  # a sum and its next term, without weights

    def _activations(self, k: int) -> float:
        """Bytes of what a block computes on a batch, with the gradients."""
        inside = self.shapes.blocks[k] / self.shapes.width  # widths of all inputs and outputs, about
        scores = 2 * self.shapes.n_heads * 256
        return ACTIVATIONS * _FLOAT * self.tokens.batch * (inside + scores)


def _fit_in_memory(shapes: Shapes, limits: Limits) -> bool:
    return _FLOAT * shapes.n_parameters <= limits.weights


def _factors(shape: Shape) -> float:
    """Bytes of a weight and its components."""
    m, n = shape
    return _FLOAT * (m * n + (m + n) * min(m, n))


def factor_bytes(shapes: Shapes, request: Request) -> float:
    """Return the bytes of all weights with their factors of full rank."""
    of_moments = 2.0 if request.in_bits else 0.0  # rounded weights are held with their moments, in double precision
    return sum(_factors((m, n)) + of_moments * _FLOAT * (m * m + n * n) for m, n in shapes.all_weights())


def spill_bytes(shapes: Shapes, request: Request, tokens: Tokens, limits: Limits) -> int:
    """Return the bytes of streams, statistics and, in a folder of the caller, decompositions between blocks."""
    if not request.fits_model:
        return 0
    per_token = _FLOAT * shapes.width
    streams = per_token * tokens.fit * (len(shapes.blocks) + 1)
    gradients = per_token * tokens.statistics * 2 * PROBES  # at the output and at the input of a block
    truncated = per_token * tokens.fit * 2
    blocks = range(len(shapes.blocks))
    widths = [moment_widths(shapes, k, with_slopes=True) for k in blocks]
    # inputs and gradients in a block, until their moments are summed
    observed = 0 if _fit_in_memory(shapes, limits) else _FLOAT * tokens.statistics * max(map(sum, widths))
    moments = _FLOAT * sum(n * n for of_block in widths for n in of_block)
    moments += _FLOAT * sum(2 * width**2 + vocab for vocab, width in shapes.tables)
    resumed = request.spill_folder is not None  # from decompositions
    components = sum(_factors((m, n)) - _FLOAT * m * n for m, n in shapes.all_weights()) if resumed else 0.0
    return int(streams + max(gradients + observed, truncated) + moments + components)


def temporary_bytes(shapes: Shapes, request: Request, limits: Limits) -> int:
    """Return the bytes of the files of factors that do not fit into memory."""
    every = factor_bytes(shapes, request)
    return 0 if every <= limits.cache else int(every - limits.cache)
