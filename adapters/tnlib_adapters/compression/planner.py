"""From what is asked for to the factors: the attention and the matrices around it under one budget."""

from __future__ import annotations

from dataclasses import replace

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.calibrate import factorise_calibrated
from tnlib_adapters.compression.calibration.whitening import factorise_whitened, inputs_of_text
from tnlib_adapters.compression.evaluation.error_measures import RELATIVE, measure_of_text
from tnlib_adapters.compression.methods.calibrated import UntouchedLayer
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.methods.other_matrices import names_of, read_matrix
from tnlib_adapters.compression.methods.uncalibrated import factorise
from tnlib_adapters.compression.plan import Plan
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.request import Request


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
    what, inputs = request.what, dict[str, Array]()
    if text is not None and request.by_gates:
        return factorise_calibrated(checkpoint, text, progress, what=what, file=request.statistics)
    if text is not None:
        inputs = inputs_of_text(checkpoint, text, progress, what=what)
    matrices = [read_matrix(checkpoint, name, inputs.get(name)) for name in names_of(checkpoint, what)]
    if what == "mlp":
        layers = [UntouchedLayer() for _ in range(checkpoint.n_layers)]
        measure = RELATIVE if text is None else measure_of_text(checkpoint)
        attention = Factorisation(request.method, layers, 0, measure, foretells=text is None)
    elif text is None:
        attention = factorise(checkpoint, request.method, progress)
    else:
        attention = factorise_whitened(checkpoint, request.method, inputs, progress)
    n_before = attention.n_before + sum(one.n_before for one in matrices)
    return replace(attention, modules=matrices, n_before=n_before)
