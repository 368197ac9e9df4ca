"""Factorisation of a checkpoint for a request, and the plan of its factors under one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.compressed_part import compressed_weights, error_weight
from tnlib_adapters.compression.methods.decompositions import FactorisedWeight, factorise_layer
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, ModuleWeights, Plan
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.method_table import TABLE, Method, resolve
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredMatrices, Workspace
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.factors.factored_matrix import rounded
from tnlib_adapters.factors.model_weights import count_parameters


def make_plan(
    source: SourceModel,
    request: Request,
    text: TokenSequences | None,
    progress: Progress,
    workspace: Workspace | None = None,
) -> Plan:
    """Return the factors for a request, chosen by the calibration text if there is one, and rounded if requested.

    `workspace` has the memory and the temporary files of the factors; None for the default memory, without files.
    Raises `ArgumentError` if no allocation meets the request, or the text is too short.
    """
    workspace = workspace or Workspace()
    if text is None:
        factorisation = factorise(source.checkpoint, request.method, progress, what=request.what, workspace=workspace)
    else:
        with_text = resolve(TABLE[request.method].factorise)
        factorisation = replace(with_text(source, text, request, workspace), workspace=workspace)
    plan = factorisation.plan_of(factorisation.select(request.budget), progress, is_last=True)
    del factorisation  # and its files
    if request.budget.width is None or request.in_bits:
        return plan
    return round_plan(plan, source.checkpoint.wiring, request.budget.width)


def round_plan(plan: Plan, wiring: Wiring, bits: int) -> Plan:
    """Return a plan with all factors rounded to the nearest integers of `bits` bits."""
    matrices = StoredMatrices(plan.matrices.workspace)
    for module, of_module in plan.matrices.items():
        matrices.add(module, [rounded(matrix, bits, by_row=wiring.is_embedding(module)) for matrix in of_module])
    return replace(plan, matrices=matrices)


def factorise(
    checkpoint: Checkpoint,
    method: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    workspace: Workspace | None = None,
) -> Factorisation:
    """Factorise the weights of a checkpoint by a method of `METHODS`, or by "matrix" where it does not apply.

    The model and the method are those of a checked request. `workspace` has the memory and temporary files of the
    factors; None for the default memory, without files.
    """
    row, weights, workspace = TABLE[method], compressed_weights(checkpoint, what), workspace or Workspace()
    modules = {own.module: own for own in weights}
    rotary, parts = has_rotary_or_norms(checkpoint), dict[str, LazyPart]()

    def calls() -> Iterator[Callable[[], Factorised]]:
        """Yield the calls with all arrays they need, which are read when a call is submitted."""
        for own in modules.values():
            if own.of:
                yield partial(factorise_layer, row, checkpoint.projections(own.group), checkpoint.sizes, rotary=rotary)
            else:
                applied = row if own.role in row.applies_to else TABLE["matrix"]
                yield partial(_factorise_module, applied, own.read(), 0 if own.bias is None else own.bias.size)

    made = workspace.workers.map(calls())
    for done, module in enumerate(modules):
        progress("factorising", done, len(modules))
        parts[module] = LazyPart(next(made), workspace)
    progress("factorising", len(modules), len(modules))
    return Factorisation(
        method,
        parts,
        count_parameters(weights),
        predicts_error=row.predicts_error,
        weights={module: error_weight(checkpoint, own) for module, own in modules.items()},
        workspace=workspace,
    )


def _factorise_module(method: Method, weight: Array, n_bias: int) -> ModuleWeights:
    return ModuleWeights({"": FactorisedWeight(weight, resolve(method.factorise)(weight))}, n_bias)
