"""Factorisation of a checkpoint for a request, and the plan of its factors under one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.whitening import (
    factorise_layer_on,
    factorise_tied_on,
    factorise_weight_on,
    inputs_of_text,
)
from tnlib_adapters.compression.cluster.cluster_workspace import cluster_of
from tnlib_adapters.compression.cluster.factorised_parts import factorise_parts
from tnlib_adapters.compression.methods.components import Inputs
from tnlib_adapters.compression.methods.factorisation import RELATIVE, Factorisation, Factorised, Plan, measure_of_text
from tnlib_adapters.compression.methods.factorise import ModuleWeight, factorise_layer, factorise_weight
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import names_of, read_weight, role_of, weight_of
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredMatrices, Workspace
from tnlib_adapters.compression.methods.table import TABLE, Method, resolve
from tnlib_adapters.compression.request import (
    Progress,
    Request,
    check_attention,
    check_method,
    check_runs,
    check_uncompressed,
    quiet,
)
from tnlib_adapters.compression.sizes import count_compressed
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import rounded


def make_plan(
    source: SourceModel, request: Request, text: str | None, progress: Progress, workspace: Workspace | None = None
) -> Plan:
    """Return the factors for a request, chosen by the calibration text if there is one, and rounded if requested.

    `workspace` has the memory and the temporary files of the factors; None for the default memory, without files.

    Raises
    ------
    ArgumentError
        If no allocation meets the request, the text is too short, or the statistics file is of another model or text.
    """
    factorisation = _factorise(source, request, text, progress, workspace or Workspace())
    plan = factorisation.plan_of(_choose(factorisation, request), progress)
    del factorisation  # and its files
    if request.width is None or request.in_bits:
        return plan
    return round_plan(plan, source.checkpoint.wiring, request.width)


def _choose(factorisation: Factorisation, request: Request) -> list[int]:
    """Return the option of every block for the budget of a request."""
    if request.in_bits:
        return factorisation.select_bits(request.bits, request.max_error, request.keep)
    return factorisation.select(request.keep, request.max_error, request.flops)


def round_plan(plan: Plan, wiring: Wiring, bits: int) -> Plan:
    """Return a plan with all factors rounded to the nearest integers of `bits` bits."""
    matrices = StoredMatrices(StoredMatrices.of(plan.matrices).workspace)
    for module, own in plan.matrices.items():
        matrices.add(module, [rounded(matrix, bits, by_row=wiring.is_embedding(module)) for matrix in own])
    return replace(plan, matrices=matrices)


def _factorise(
    source: SourceModel, request: Request, text: str | None, progress: Progress, workspace: Workspace
) -> Factorisation:
    checkpoint = source.checkpoint
    if text is None:
        return factorise(checkpoint, request.method, progress, what=request.what, workspace=workspace)
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
            workspace=workspace,
            **width,
        )
        return replace(factorisation, workspace=workspace)
    inputs = inputs_of_text(checkpoint, text, progress, what=request.what, source=source, workspace=workspace)
    return factorise(checkpoint, request.method, progress, what=request.what, inputs=inputs, workspace=workspace)


def factorise(
    checkpoint: Checkpoint,
    method: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    inputs: Mapping[str, Array] | None = None,
    workspace: Workspace | None = None,
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
    workspace
        Memory and temporary files of the factors; None for the default memory, beyond which they are made again.

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
    row, workspace = TABLE[method], workspace or Workspace()
    layers = [checkpoint.wiring.attention_modules[k] for k in checkpoint.wiring.projection_layers(what)]
    names = names_of(checkpoint, what, with_text=inputs is not None)
    rotary = has_rotary_or_norms(checkpoint)
    make: dict[str, Callable[[Checkpoint], Factorised]] = {
        module: partial(_layer, row, k=k, inputs=inputs, rotary=rotary) for k, module in enumerate(layers)
    }
    for name in names:
        own = row if role_of(checkpoint.wiring, name) in row.applies_to else TABLE["matrix"]
        make[name] = partial(_weight, own, name=name, inputs=inputs)
    parts = _factorised_parts(checkpoint, make, workspace, progress)
    predicts = row.predicts_error and inputs is None
    measure = RELATIVE if inputs is None else measure_of_text(checkpoint)
    weights = {name: weight_of(checkpoint, name) for name in names}
    return Factorisation(
        method,
        parts,
        count_compressed(checkpoint, what, with_text=inputs is not None),
        measure,
        predicts_error=predicts,
        weights=weights,
        workspace=workspace,
    )


def _factorised_parts(
    checkpoint: Checkpoint,
    make: Mapping[str, Callable[[Checkpoint], Factorised]],
    workspace: Workspace,
    progress: Progress,
) -> dict[str, Factorised]:
    """Return the factorised weights by module, made one after the other or by workers."""
    if (cluster := cluster_of(workspace)) is not None:
        return factorise_parts(cluster, checkpoint, make, workspace, progress)
    parts = dict[str, Factorised]()
    for done, (module, own) in enumerate(make.items()):
        progress("factorising", done, len(make))
        parts[module] = LazyPart(partial(own, checkpoint), workspace)
    progress("factorising", len(make), len(make))
    return parts


def _layer(
    method: Method, checkpoint: Checkpoint, k: int, inputs: Mapping[str, Array] | None, *, rotary: bool
) -> Factorised:
    projections = checkpoint.projections(k)
    if inputs is None:
        return factorise_layer(method, projections, checkpoint.sizes, rotary=rotary)
    moments = Inputs(inputs[f"{k}.x"], inputs[f"{k}.y"])
    return factorise_layer_on(method, projections, checkpoint.sizes, moments, rotary=rotary)


def _weight(method: Method, checkpoint: Checkpoint, name: str, inputs: Mapping[str, Array] | None) -> Factorised:
    """Factorise the weight of a module outside the attention."""
    weight, n_bias = read_weight(checkpoint, name)
    tied_key = checkpoint.wiring.tied_key if checkpoint.wiring.is_tied(name) else None
    if inputs is None:
        factorised = factorise_weight(method, weight)
    elif tied_key is None:
        factorised = factorise_weight_on(method, weight, inputs[name])
    else:
        factorised = factorise_tied_on(method, weight, inputs[name], inputs[tied_key])
    return ModuleWeight(weight, factorised, n_bias)
