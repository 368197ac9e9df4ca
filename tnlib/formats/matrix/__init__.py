"""Matrices in factored form: SVD, low-rank products, sums of Kronecker products."""

from tnlib._registry import register

register(
    "tnlib.formats.matrix.svd:SVD",
    round="tnlib.formats.matrix.operations:round_svd",
    kron="tnlib.formats.matrix.operations:kron_svd",
    outer="tnlib.formats.matrix.operations:outer_svd",
    canonical_form="tnlib.formats.matrix.operations:canonical_svd",
    to_LowRank="tnlib.formats.matrix.conversion:svd_to_low_rank",
    to_TensorTrain="tnlib.formats.matrix.conversion:svd_to_train",
    diagram="tnlib.formats.matrix.diagram:svd_diagram",
)
register(
    "tnlib.formats.matrix.low_rank:LowRank",
    round="tnlib.formats.matrix.operations:round_low_rank",
    inner="tnlib.formats.matrix.operations:inner_low_rank",
    kron="tnlib.formats.matrix.operations:kron_low_rank",
    outer="tnlib.formats.matrix.operations:outer_low_rank",
    canonical_form="tnlib.formats.matrix.operations:canonical_low_rank",
    to_SVD="tnlib.formats.matrix.conversion:low_rank_to_svd",
    to_TensorTrain="tnlib.formats.matrix.conversion:low_rank_to_train",
    diagram="tnlib.formats.matrix.diagram:low_rank_diagram",
)
register(
    "tnlib.formats.matrix.kronecker_terms:KroneckerTerms",
    round="tnlib.formats.matrix.operator_schmidt:round_terms",
    inner="tnlib.formats.matrix.operations:inner_terms",
    kron="tnlib.formats.matrix.operations:kron_terms",
    schmidt_values="tnlib.formats.matrix.operator_schmidt:terms_schmidt_values",
    ttm_svd="tnlib.formats.matrix.operator_schmidt:terms_ttm_svd",
    to_TTMatrix="tnlib.formats.matrix.conversion:terms_to_tt_matrix",
    diagram="tnlib.formats.matrix.diagram:kronecker_terms_diagram",
)
register("tnlib.formats.train.format:TensorTrain", to_LowRank="tnlib.formats.matrix.conversion:train_to_low_rank")
register(
    "tnlib.formats.train.tt_matrix:TTMatrix", to_KroneckerTerms="tnlib.formats.matrix.conversion:tt_matrix_to_terms"
)
register("tnlib.formats.tucker.format:Tucker", to_LowRank="tnlib.formats.matrix.conversion:tucker_to_low_rank")
register("tnlib.formats.cp.format:CP", to_LowRank="tnlib.formats.matrix.conversion:cp_to_low_rank")
