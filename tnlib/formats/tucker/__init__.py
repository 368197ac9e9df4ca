"""The Tucker format and the higher-order SVD."""

from tnlib._registry import register

register(
    "tnlib.formats.tucker.format:Tucker",
    round="tnlib.formats.tucker.operations:round_tucker",
    inner="tnlib.formats.tucker.operations:inner_tucker",
    kron="tnlib.formats.tucker.operations:kron_tucker",
    outer="tnlib.formats.tucker.operations:outer_tucker",
    contract_vectors="tnlib.formats.tucker.operations:contract_vectors",
    canonical_form="tnlib.formats.tucker.operations:canonical_tucker",
)
