"""Matrices in factored form: SVD, low-rank products, sums of Kronecker products."""

from tnlib._registry import register

register(
    "tnlib.formats.matrix.svd:SVD",
    round="tnlib.formats.matrix.operations:round_svd",
    kron="tnlib.formats.matrix.operations:kron_svd",
    outer="tnlib.formats.matrix.operations:outer_svd",
    canonical_form="tnlib.formats.matrix.operations:canonical_svd",
)
register(
    "tnlib.formats.matrix.low_rank:LowRank",
    round="tnlib.formats.matrix.operations:round_low_rank",
    inner="tnlib.formats.matrix.operations:inner_low_rank",
    kron="tnlib.formats.matrix.operations:kron_low_rank",
    outer="tnlib.formats.matrix.operations:outer_low_rank",
    canonical_form="tnlib.formats.matrix.operations:canonical_low_rank",
)
register(
    "tnlib.formats.matrix.kronecker_terms:KroneckerTerms",
    round="tnlib.formats.matrix.operator_schmidt:round_terms",
    inner="tnlib.formats.matrix.operations:inner_terms",
    kron="tnlib.formats.matrix.operations:kron_terms",
    schmidt_values="tnlib.formats.matrix.operator_schmidt:terms_schmidt_values",
    ttm_svd="tnlib.formats.matrix.operator_schmidt:terms_ttm_svd",
)
