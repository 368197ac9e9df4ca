"""The formats, one folder each. Their diagrams, and the conversions from one to another, are registered here."""

from tnlib._registry import register

register(
    "tnlib.formats.train.format:TensorTrain",
    to_Tucker="tnlib.formats.conversions:train_to_tucker",
    to_CP="tnlib.formats.conversions:train_to_cp",
    to_LowRank="tnlib.formats.conversions:train_to_low_rank",
    diagram="tnlib.formats.diagrams:train_diagram",
)
register(
    "tnlib.formats.train.tt_matrix:TTMatrix",
    to_KroneckerTerms="tnlib.formats.conversions:tt_matrix_to_terms",
    diagram="tnlib.formats.diagrams:train_diagram",
)
register("tnlib.formats.train.vidal:Vidal", diagram="tnlib.formats.diagrams:vidal_diagram")
register(
    "tnlib.formats.tucker.format:Tucker",
    to_TensorTrain="tnlib.formats.conversions:tucker_to_train",
    to_LowRank="tnlib.formats.conversions:tucker_to_low_rank",
    diagram="tnlib.formats.diagrams:tucker_diagram",
)
register(
    "tnlib.formats.cp.format:CP",
    to_TensorTrain="tnlib.formats.conversions:cp_to_train",
    to_Tucker="tnlib.formats.conversions:cp_to_tucker",
    to_LowRank="tnlib.formats.conversions:cp_to_low_rank",
    diagram="tnlib.formats.diagrams:cp_diagram",
)
register(
    "tnlib.formats.matrix.svd:SVD",
    to_LowRank="tnlib.formats.conversions:svd_to_low_rank",
    to_TensorTrain="tnlib.formats.conversions:svd_to_train",
    diagram="tnlib.formats.diagrams:svd_diagram",
)
register(
    "tnlib.formats.matrix.low_rank:LowRank",
    to_SVD="tnlib.formats.conversions:low_rank_to_svd",
    to_TensorTrain="tnlib.formats.conversions:low_rank_to_train",
    diagram="tnlib.formats.diagrams:low_rank_diagram",
)
register(
    "tnlib.formats.matrix.kronecker_terms:KroneckerTerms",
    to_TTMatrix="tnlib.formats.conversions:terms_to_tt_matrix",
    diagram="tnlib.formats.diagrams:kronecker_terms_diagram",
)
