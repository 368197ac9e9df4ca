"""Factorisation of a checkpoint for a request, and the plan of its factors under one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.compressed_part import count_compressed, names_of, read_weight, role_of, weight_of
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, ModuleWeights, Plan
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.matrices import FactorisedWeight, factorise_layer
from tnlib_adapters.compression.methods.method_table import TABLE, Method, resolve
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredMatrices, Workspace
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import Request, check_attention, check_method, check_runs, check_uncompressed
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.factors.factored_matrix import rounded

Call = Callable[[], Factorised]  # with all arrays it needs


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
    factorisation = _factorise(source, request, text, progress, workspace or Workspace())
    plan = factorisation.plan_of(factorisation.select(request.budget), progress)
    del factorisation  # and its files
    if request.budget.width is None or request.in_bits:
        return plan
    return round_plan(plan, source.checkpoint.wiring, request.budget.width)


def round_plan(plan: Plan, wiring: Wiring, bits: int) -> Plan:
    """Return a plan with all factors rounded to the nearest integers of `bits` bits."""
    matrices = StoredMatrices(StoredMatrices.of(plan.matrices).workspace)
    for module, of_module in plan.matrices.items():
        matrices.add(module, [rounded(matrix, bits, by_row=wiring.is_embedding(module)) for matrix in of_module])
    return replace(plan, matrices=matrices)


def _factorise(
    source: SourceModel, request: Request, text: TokenSequences | None, progress: Progress, workspace: Workspace
) -> Factorisation:
    if text is None:
        return factorise(source.checkpoint, request.method, progress, what=request.what, workspace=workspace)
    factorisation: Factorisation = resolve(TABLE[request.method].factorise)(source, text, request, workspace)
    return replace(factorisation, workspace=workspace)


def factorise(
    checkpoint: Checkpoint,
    method: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    workspace: Workspace | None = None,
) -> Factorisation:
    """Factorise the weights of a checkpoint by a method of `METHODS`, or by "matrix" where it does not apply.

    `workspace` has the memory and temporary files of the factors; None for the default memory, without files. Raises
    `ArgumentError` if the method is not known, this model cannot run it, or the checkpoint is already compressed.
    """
    check_method("compress", method)
    check_uncompressed("compress", checkpoint)
    if what != "mlp":
        check_attention("compress", checkpoint, method)
    check_runs("compress", checkpoint, method)
    row, workspace = TABLE[method], workspace or Workspace()
    layers = [checkpoint.wiring.attention_modules[k] for k in checkpoint.wiring.projection_layers(what)]
    names = names_of(checkpoint, what)
    rotary = has_rotary_or_norms(checkpoint)
    calls: dict[str, Callable[[], Call]] = {
        module: partial(_layer, row, checkpoint, k, rotary=rotary) for k, module in enumerate(layers)
    }
    for name in names:
        applied = row if role_of(checkpoint.wiring, name) in row.applies_to else TABLE["matrix"]
        calls[name] = partial(_weight, applied, checkpoint, name)
    parts = _factorised_parts(calls, workspace, progress)
    weights = {name: weight_of(checkpoint, name) for name in names}
    return Factorisation(
        method,
        parts,
        count_compressed(checkpoint, what, with_text=False),
        predicts_error=row.predicts_error,
        weights=weights,
        workspace=workspace,
    )


def _factorised_parts(
    calls: Mapping[str, Callable[[], Call]], workspace: Workspace, progress: Progress
) -> dict[str, Factorised]:
    """Return the factorised weights by module; the arrays of a call are read when it is submitted."""
    parts, made = dict[str, Factorised](), workspace.workers.map(read() for read in calls.values())
    for done, module in enumerate(calls):
        progress("factorising", done, len(calls))
        parts[module] = LazyPart(next(made), workspace)
    progress("factorising", len(calls), len(calls))
    return parts


def _layer(method: Method, checkpoint: Checkpoint, k: int, *, rotary: bool) -> Call:
    """Read a layer, and return the call that factorises it."""
    return partial(factorise_layer, method, checkpoint.projections(k), checkpoint.sizes, rotary=rotary)


def _weight(method: Method, checkpoint: Checkpoint, name: str) -> Call:
    """Read the weight of a module outside the attention, and return the call that factorises it."""
    return partial(_module_weight, method, *read_weight(checkpoint, name))


def _module_weight(method: Method, weight: Array, n_bias: int) -> ModuleWeights:
    return ModuleWeights({"": FactorisedWeight(weight, resolve(method.factorise)(weight))}, n_bias)
