"""Tensor trains (matrix product states) and TT-matrices (matrix product operators)."""

from tnlib._registry import register

_SHARED = {
    "round": "tnlib.formats.train.tt_rounding:round_train",
    "inner": "tnlib.formats.train.operations:inner_trains",
    "entries": "tnlib.formats.train.operations:train_entries",
    "canonical_form": "tnlib.formats.train.tt_rounding:canonical_train",
}

register(
    "tnlib.formats.train.format:TensorTrain",
    **_SHARED,
    kron="tnlib.formats.train.operations:kron_trains",
    outer="tnlib.formats.train.operations:chain_trains",
    contract_vectors="tnlib.formats.train.operations:contract_vectors",
    to_TTMatrix="tnlib.formats.train.tt_matrix:as_column",
    to_Vidal="tnlib.formats.train.vidal:vidal",
)
register(
    "tnlib.formats.train.tt_matrix:TTMatrix",
    **_SHARED,
    kron="tnlib.formats.train.operations:chain_trains",
    to_TensorTrain="tnlib.formats.train.tt_matrix:TTMatrix.fused",
)
register(
    "tnlib.formats.train.vidal:Vidal",
    to_TensorTrain="tnlib.formats.train.vidal:Vidal.train",
)
