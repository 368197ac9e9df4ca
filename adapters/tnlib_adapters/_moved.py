"""Module names of version 0.1: importing one gives the module that replaced it, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

PACKAGE = "tnlib_adapters"
MOVED = {
    "attention.arguments": "attention.layer_arguments",
    "attention.balance_terms": "attention.gauge.balance_terms",
    "attention.changed": "checkpoints.modified",
    "attention.checkpoint": "checkpoints.checkpoint",
    "attention.checks": "checkpoints.arguments",
    "attention.fold_norms": "transforms.norm_folding",
    "attention.folding": "transforms.folding",
    "attention.format_table": "checkpoints.format_table",
    "attention.frozen_diagrams": "attention.frozen.diagrams",
    "attention.frozen_stack": "transforms.freezing",
    "attention.head_gauge": "transforms.gauge_fixing",
    "attention.head_order": "attention.gauge.head_order",
    "attention.index": "attention.indices",
    "attention.layer_gauge": "attention.gauge.layer",
    "attention.learned": "attention.learned_positions",
    "attention.module": "attention.loaded_module",
    "attention.norm_gauge": "attention.gauge.head_norms",
    "attention.residual_product": "attention.frozen.residual_product",
    "attention.rotation": "transforms.rotation",
    "attention.score_gauge": "attention.gauge.scores",
    "attention.shapes": "attention.weight_shapes",
    "attention.stacks": "checkpoints.weight_stacks",
    "attention.stream": "checkpoints.residual_stream",
    "checkpoints.architectures": "architectures.table",
    "checkpoints.bf16": "files.bf16",
    "checkpoints.factored": "factors.attention_factors",
    "checkpoints.folder": "files.folder",
    "checkpoints.int8": "factors.int8",
    "checkpoints.interpolative": "factors.interpolative",
    "checkpoints.modules": "factors.module_factors",
    "checkpoints.products": "factors.products",
    "checkpoints.projections": "factors.projections",
    "checkpoints.rope": "architectures.rope",
    "checkpoints.row": "architectures.architecture",
    "checkpoints.rules": "architectures.config_rules",
    "checkpoints.tensor_file": "files.tensor_file",
    "checkpoints.token_names": "files.token_names",
    "circuits.additive_terms": "circuits.discovery.stream_terms",
    "circuits.angles": "circuits.composition.angles",
    "circuits.apart": "circuits.heads.token_and_position",
    "circuits.attending": "circuits.heads.pattern_scores",
    "circuits.block_diagrams": "circuits.diagrams.blocks",
    "circuits.by_weights": "circuits.heads.weight_scores",
    "circuits.chance": "circuits.composition.chance_level",
    "circuits.composition_diagrams": "circuits.diagrams.head_composition",
    "circuits.diagram_parts": "circuits.diagrams.elements",
    "circuits.direct_path": "circuits.tokens.direct_path",
    "circuits.ends": "circuits.tokens.embeddings",
    "circuits.features": "circuits.heads.singular_features",
    "circuits.gates": "circuits.discovery.edge_gates",
    "circuits.head_reading": "circuits.heads.head_reading",
    "circuits.induction": "circuits.heads.induction_heads",
    "circuits.key_shares": "circuits.heads.score_shares",
    "circuits.layers": "circuits.arguments",
    "circuits.losses_by_path": "circuits.paths.path_ablation",
    "circuits.maximum": "circuits.heads.bilinear_maximum",
    "circuits.model_diagrams": "circuits.diagrams.models",
    "circuits.open_layer": "circuits.paths.attention_layer",
    "circuits.orders": "circuits.paths.path_orders",
    "circuits.parts": "circuits.paths.stream_parts",
    "circuits.pictures": "circuits.diagrams.heat_maps",
    "circuits.pruned_circuit": "circuits.discovery.circuit_search",
    "circuits.pruning": "circuits.discovery.greedy_pruning",
    "circuits.stream_head": "circuits.heads.effective_head",
    "circuits.subspaces": "circuits.composition.subspaces",
    "circuits.targets": "circuits.tokens.targets",
    "circuits.term_diagrams": "circuits.diagrams.terms",
    "circuits.token_copying": "circuits.tokens.copying_scores",
    "circuits.token_features": "circuits.tokens.token_features",
    "circuits.toy_head": "circuits.heads.toy_induction",
    "circuits.two_layers": "circuits.paths.two_layer_terms",
    "circuits.vocabulary": "circuits.tokens.vocabulary",
    "compression.bench": "compression.evaluation.trial_run",
    "compression.calibrated": "compression.methods.calibrated",
    "compression.compare_pictures": "compression.compare.pictures",
    "compression.compare_text": "compression.compare.on_text",
    "compression.components": "compression.methods.components",
    "compression.counting": "compression.sizes",
    "compression.evaluate": "compression.evaluation.evaluate",
    "compression.factorisation": "compression.methods.factorisation",
    "compression.forecast": "compression.evaluation.error_measures",
    "compression.heads": "compression.methods.head_products",
    "compression.markup": "compression.report.html",
    "compression.matrices": "compression.methods.matrices",
    "compression.measured": "compression.report.measured",
    "compression.memory": "compression.report.memory",
    "compression.modules": "compression.methods.other_matrices",
    "compression.moments": "compression.calibration.moments",
    "compression.names": "compression.choices",
    "compression.operator_errors": "compression.evaluation.operator_errors",
    "compression.page": "compression.report.page",
    "compression.parallel_map": "compression.methods.parallel_map",
    "compression.pictures": "compression.report.pictures",
    "compression.plain": "compression.methods.uncalibrated",
    "compression.plain_int8": "compression.methods.int8_baseline",
    "compression.planning": "compression.planner",
    "compression.quality": "compression.evaluation.quality",
    "compression.rows": "compression.compare.rows",
    "compression.shared_bases": "compression.methods.shared_bases",
    "compression.stacks": "compression.methods.tensor_stacks",
    "compression.statistics": "compression.calibration.statistics",
    "compression.statistics_file": "compression.calibration.statistics_file",
    "compression.summary": "compression.report.summary",
    "compression.terminal": "compression.report.terminal",
    "compression.text": "compression.calibration.text",
    "compression.trials": "compression.compare.trials",
    "compression.weighted_ttm": "compression.methods.weighted_ttm",
    "compression.whitening": "compression.calibration.whitening",
    "compression.whole": "files.atomic_folder",
    "forward": "reference",
    "forward.embedding": "reference.embedding",
    "forward.layers": "reference.layers",
    "forward.model": "reference.model",
    "forward.weights": "reference.weights",
    "physics": "interop",
    "physics.itensor": "interop.itensor",
    "physics.pyttb": "interop.pyttb",
    "physics.quimb": "interop.quimb",
    "physics.teneva": "interop.teneva",
    "physics.tenpy": "interop.tenpy",
    "physics.tensorkrowch": "interop.tensorkrowch",
    "physics.tensorly": "interop.tensorly",
    "physics.tntorch": "interop.tntorch",
    "physics.torchtt": "interop.torchtt",
    "physics.ttpy": "interop.ttpy",
    "torch": "transformers_plugin",
    "torch.elsewhere": "transformers_plugin.module_layers",
    "torch.heads": "transformers_plugin.head_linear",
    "torch.hooks": "instrument",
    "torch.hooks.block": "instrument.block_replacement",
    "torch.hooks.local": "instrument.layer_fit",
    "torch.hooks.running": "instrument.running_model",
    "torch.hooks.weights": "instrument.weight_inputs",
    "torch.interpolative": "transformers_plugin.interpolative_linear",
    "torch.layers": "transformers_plugin.attention_layers",
    "torch.modules": "transformers_plugin.factored_linear",
    "torch.multilinear": "transformers_plugin.tucker_cp_linear",
    "torch.reload": "transformers_plugin.quantizer",
}


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by their old names, and loads nothing twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = MOVED.get(fullname.removeprefix(f"{PACKAGE}."))
        if new is None or not fullname.startswith(PACKAGE):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = f"{PACKAGE}.{MOVED[spec.name.removeprefix(f'{PACKAGE}.')]}"
        warnings.warn(f"{spec.name} is deprecated; import {new} instead.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module with the name under which it was loaded first."""
        module.__spec__ = getattr(module.__spec__, "loader_state", module.__spec__)


def install() -> None:
    """Let the import system find modules by their old names."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
