"""The CP format: alternating least squares, Levenberg-Marquardt, matching of components."""

import lazy_loader

from tnlib._registry import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register(
    "tnlib.formats.cp.format:CP",
    inner="tnlib.formats.cp.operations:inner_cp",
    kron="tnlib.formats.cp.operations:kron_cp",
    outer="tnlib.formats.cp.operations:outer_cp",
    entries="tnlib.formats.cp.operations:cp_entries",
    contract_vectors="tnlib.formats.cp.operations:contract_vectors",
    canonical_form="tnlib.formats.cp.normalization:canonical_cp",
    to_TensorTrain="tnlib.formats.cp.conversion:cp_to_train",
    to_Tucker="tnlib.formats.cp.conversion:cp_to_tucker",
    diagram="tnlib.formats.cp.diagram:cp_diagram",
)
register(
    "tnlib.formats.train.format:TensorTrain",
    to_CP="tnlib.formats.cp.conversion:train_to_cp",
)
