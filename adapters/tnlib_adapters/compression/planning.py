"""From what is asked for to the factors: the attention and the matrices around it under one budget."""

from __future__ import annotations

from dataclasses import replace

from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.compression.calibrated import UntouchedLayer
from tnlib_adapters.compression.calibration import factorise_calibrated
from tnlib_adapters.compression.factorisation import Factorisation
from tnlib_adapters.compression.forecast import RELATIVE, measure_of_text
from tnlib_adapters.compression.modules import Matrix, collect_matrices, names_of, read_matrices
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
    found = _factorise(checkpoint, request, text, progress)
    return found.at(found.select(request.keep, request.max_error), progress)


def _factorise(checkpoint: Checkpoint, request: Request, text: str | None, progress: Progress) -> Factorisation:
    if text is not None and request.by_gates:
        return factorise_calibrated(checkpoint, text, progress, what=request.what, file=request.statistics)
    attention = _attention(checkpoint, request, text, progress)
    matrices = _matrices(checkpoint, request, text, progress)
    n_before = attention.n_before + sum(one.n_before for one in matrices)
    return replace(attention, modules=matrices, n_before=n_before)


def _attention(checkpoint: Checkpoint, request: Request, text: str | None, progress: Progress) -> Factorisation:
    if request.what == "mlp":
        layers = [UntouchedLayer() for _ in range(checkpoint.n_layers)]
        measure = RELATIVE if text is None else measure_of_text(checkpoint)
        return Factorisation(request.method, layers, 0, measure, foretells=text is None)
    if text is None:
        return factorise(checkpoint, request.method, progress)
    return factorise_whitened(checkpoint, request.method, inputs_of_text(checkpoint, text, progress), progress)


def _matrices(checkpoint: Checkpoint, request: Request, text: str | None, progress: Progress) -> list[Matrix]:
    names = names_of(checkpoint, request.what)
    if text is None or not names:
        return read_matrices(checkpoint, names)
    from tnlib_adapters.torch.hooks.running import open_running

    model = open_running(checkpoint.folder.path)
    seen = collect_matrices(model, names, some_of(model.batches(text), _TOKENS), progress)
    return read_matrices(checkpoint, names, [replace(one, slopes=None) for one in seen])
