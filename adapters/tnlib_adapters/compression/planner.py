"""Factorisation of a checkpoint for a request, and the plan of its factors under one budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.whitening import (
    factorise_layer_on,
    factorise_tied_on,
    factorise_weight_on,
    inputs_of_text,
)
from tnlib_adapters.compression.methods.components import Inputs
from tnlib_adapters.compression.methods.factorisation import RELATIVE, Factorisation, Factorised, Plan, measure_of_text
from tnlib_adapters.compression.methods.factorise import ModuleWeight, factorise_layer, factorise_weight
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import names_of, read_weight, role_of, weight_of
from tnlib_adapters.compression.methods.table import TABLE, resolve
from tnlib_adapters.compression.request import (
    Progress,
    Request,
    check_attention,
    check_method,
    check_runs,
    check_uncompressed,
    quiet,
)
from tnlib_adapters.compression.sizes import count_attention
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import rounded


def make_plan(source: SourceModel, request: Request, text: str | None, progress: Progress) -> Plan:
    """Return the factors for a request, chosen by the calibration text if there is one.

    Raises
    ------
    ArgumentError
        If no allocation meets the request, the text is too short, or the statistics file is of another model or text.
    """
    factorisation = _factorise(source, request, text, progress)
    return factorisation.plan_of(_choose(factorisation, request), progress)


def _choose(factorisation: Factorisation, request: Request) -> list[int]:
    """Return the option of every block for the budget of a request."""
    if request.in_bits:
        return factorisation.select_bits(request.bits, request.max_error, request.keep)
    return factorisation.select(request.keep, request.max_error)


def round_plan(plan: Plan, wiring: Wiring, bits: int) -> Plan:
    """Return a plan with all factors rounded to the nearest integers of `bits` bits."""
    matrices = {
        module: [rounded(matrix, bits, by_row=wiring.is_embedding(module)) for matrix in own]
        for module, own in plan.matrices.items()
    }
    return replace(plan, matrices=matrices)


def _factorise(source: SourceModel, request: Request, text: str | None, progress: Progress) -> Factorisation:
    checkpoint = source.checkpoint
    if text is None:
        return factorise(checkpoint, request.method, progress, what=request.what)
    method = TABLE[request.method]
    if method.unit == "model":
        width = {"bits": request.width, "fewer_numbers": request.keep is not None} if method.in_bits else {}
        factorisation: Factorisation = resolve(method.factorise)(
            checkpoint,
            text,
            progress,
            what=request.what,
            file=request.statistics,
            folder=request.spill_folder,
            source=source,
            **width,
        )
        return factorisation
    inputs = inputs_of_text(checkpoint, text, progress, what=request.what, source=source)
    return factorise(checkpoint, request.method, progress, what=request.what, inputs=inputs)


def factorise(
    checkpoint: Checkpoint,
    method: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    inputs: Mapping[str, Array] | None = None,
) -> Factorisation:
    """Factorise the weights of a checkpoint by a method of `METHODS`, or by "matrix" where it does not apply.

    Parameters
    ----------
    checkpoint
        Not compressed.
    method
        A key of `METHODS`.
    progress
        Called as progress(stage, done, total).
    what
        "attention", "mlp" or "all".
    inputs
        Second moments of inputs from `inputs_of_text`, to measure errors on these inputs.

    Raises
    ------
    ArgumentError
        If the method is not known, this model cannot run it, or the checkpoint is already compressed.
    """
    check_method("compress", method)
    check_uncompressed("compress", checkpoint)
    if what != "mlp":
        check_attention("compress", checkpoint, method)
    check_runs("compress", checkpoint, method)
    row, parts = TABLE[method], dict[str, Factorised]()
    layers = [checkpoint.wiring.attention_modules[k] for k in checkpoint.wiring.projection_layers(what)]
    names = names_of(checkpoint, what, with_text=inputs is not None)
    n_before = sum(count_attention(checkpoint)) if layers else 0
    rotary, total = has_rotary_or_norms(checkpoint), len(layers) + len(names)
    for k, module in enumerate(layers):
        progress("factorising", k, total)
        projections = checkpoint.projections(k)
        if inputs is None:
            parts[module] = factorise_layer(row, projections, checkpoint.sizes, rotary=rotary)
        else:
            moments = Inputs(inputs[f"{k}.x"], inputs[f"{k}.y"])
            parts[module] = factorise_layer_on(row, projections, checkpoint.sizes, moments, rotary=rotary)
    for done, name in enumerate(names):
        progress("factorising", len(layers) + done, total)
        own = row if role_of(checkpoint.wiring, name) in row.applies_to else TABLE["matrix"]
        weight, n_bias = read_weight(checkpoint, name)
        tied_key = checkpoint.wiring.tied_key if checkpoint.wiring.is_tied(name) else None
        if inputs is None:
            factorised = factorise_weight(own, weight)
        elif tied_key is None:
            factorised = factorise_weight_on(own, weight, inputs[name])
        else:
            factorised = factorise_tied_on(own, weight, inputs[name], inputs[tied_key])
        parts[name] = ModuleWeight(weight, factorised, n_bias)
        n_before += weight.size + n_bias
    progress("factorising", total, total)
    predicts = row.predicts_error and inputs is None
    measure = RELATIVE if inputs is None else measure_of_text(checkpoint)
    weights = {name: weight_of(checkpoint, name) for name in names}
    return Factorisation(
        method, parts, n_before, measure, predicts_error=predicts, weights=weights, moments=inputs or {}
    )
