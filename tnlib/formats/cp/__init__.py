"""The CP format: alternating least squares, Levenberg-Marquardt, matching of components."""

from tnlib._registry import register

register(
    "tnlib.formats.cp.format:CP",
    inner="tnlib.formats.cp.operations:inner_cp",
    kron="tnlib.formats.cp.operations:kron_cp",
    outer="tnlib.formats.cp.operations:outer_cp",
    entries="tnlib.formats.cp.operations:cp_entries",
    contract_vectors="tnlib.formats.cp.operations:contract_vectors",
    canonical_form="tnlib.formats.cp.operations:canonical_cp",
)
