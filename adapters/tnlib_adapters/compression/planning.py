"""From what is asked for to the factors: the attention and the matrices around it under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.calibration import factorise_calibrated
from tnlib_adapters.compression.factorisation import Factorisation
from tnlib_adapters.compression.forecast import RELATIVE, measure_of_text
from tnlib_adapters.compression.modules import Matrix, collect_matrices, names_of, read_matrices, weigh_matrices
from tnlib_adapters.compression.plain import factorise
from tnlib_adapters.compression.plan import Plan
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import some_of
from tnlib_adapters.compression.whitening import factorise_whitened, inputs_of_text

_TOKENS = 16_384  # of what matrices read: it settles early


def make_plan(checkpoint: Checkpoint, request: Request, text: str | None, progress: Progress) -> Plan:
    """Return the factors of all that is to be compressed, as far as was asked for, by what the text shows.

    Raises
    ------
    ArgumentError
        If no allocation meets what is asked for, the text is too short, or statistics are of something else.
    """
    attention = _attention(checkpoint, request, text, progress)
    matrices = _matrices(checkpoint, request, text, progress)
    n_before = attention.n_before + sum(one.n_before for one in matrices)
    found = replace(attention, modules=matrices, n_before=n_before)
    return found.at(found.select(request.keep, request.max_error), progress)


def _attention(checkpoint: Checkpoint, request: Request, text: str | None, progress: Progress) -> Factorisation:
    if request.what == "mlp":
        return _untouched(checkpoint, request)
    if text is None:
        return factorise(checkpoint, request.method, progress)
    if request.by_gates:
        return factorise_calibrated(checkpoint, text, progress, file=request.statistics)
    return factorise_whitened(checkpoint, request.method, inputs_of_text(checkpoint, text, progress), progress)


def _matrices(checkpoint: Checkpoint, request: Request, text: str | None, progress: Progress) -> list[Matrix]:
    names = names_of(checkpoint, request.what)
    if text is None or not names:
        return read_matrices(checkpoint, names)
    from tnlib_adapters.torch.hooks.running import open_running

    model = open_running(checkpoint.folder.path)
    batches = some_of(model.batches(text), _TOKENS)
    seen = collect_matrices(model, names, batches, progress)
    if not request.by_gates:
        return read_matrices(checkpoint, names, [replace(one, slopes=None) for one in seen])
    matrices = read_matrices(checkpoint, names, seen)
    weigh_matrices(model, matrices, batches, progress)
    return matrices


@dataclass(frozen=True)
class _Untouched:
    """The attention of a layer that stays as it is, and that no budget counts."""

    curves: Sequence[Curve] = ()
    fixed: int = 0

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return no factors."""
        return []


def _untouched(checkpoint: Checkpoint, request: Request) -> Factorisation:
    """Return a factorisation of nothing, for matrices to be put beside."""
    plain = request.calibrate is None
    measure = RELATIVE if plain else measure_of_text(checkpoint)
    layers = [_Untouched() for _ in range(checkpoint.n_layers)]
    return Factorisation(request.method, layers, 0, measure, foretells=plain or request.by_gates)
