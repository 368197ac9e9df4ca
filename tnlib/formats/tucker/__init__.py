"""The Tucker format and the higher-order SVD."""

import lazy_loader

from tnlib._registry import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register(
    "tnlib.formats.tucker.format:Tucker",
    round="tnlib.formats.tucker.operations:round_tucker",
    inner="tnlib.formats.tucker.operations:inner_tucker",
    kron="tnlib.formats.tucker.operations:kron_tucker",
    outer="tnlib.formats.tucker.operations:outer_tucker",
    contract_vectors="tnlib.formats.tucker.operations:contract_vectors",
    canonical_form="tnlib.formats.tucker.canonical_form:canonical_tucker",
    to_TensorTrain="tnlib.formats.tucker.conversion:tucker_to_train",
    diagram="tnlib.formats.tucker.diagram:tucker_diagram",
)
register(
    "tnlib.formats.train.format:TensorTrain",
    to_Tucker="tnlib.formats.tucker.conversion:train_to_tucker",
)
