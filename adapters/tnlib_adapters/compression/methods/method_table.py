"""The compression methods, one row each.

A row names the class or function that factorises as "module:name", so that the table is read without numpy. To add a
method, write one file in this folder and one row below; the command line, the checks of `compress`, comparisons and
pictures read the row. A method writes factors of existing kinds (`factors.factored_matrix.SHAPES`).
"""

from __future__ import annotations

import pkgutil
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tnlib_adapters.factors import ATTENTION, EMBEDDING, FEED_FORWARD, UNEMBEDDING

EVERYWHERE = (ATTENTION, FEED_FORWARD, EMBEDDING, UNEMBEDDING)

Reference = str | Callable[..., Any]  # "module:name", or the object
_HERE = "tnlib_adapters.compression"
METHODS: dict[str, Method] = {}  # without calibration data
WITH_TEXT: dict[str, Method] = {}  # with calibration data
TABLE = ChainMap(METHODS, WITH_TEXT)


@dataclass(frozen=True)
class Method:
    """One compression method."""

    name: str  # as `compress` and the command line take it
    help: str  # what it does to a layer, in a few words
    # what it factorises: "matrix", one weight at a time; "layer", all projections of an attention layer together;
    # "model", all weights of a model from calibration data
    unit: Literal["matrix", "layer", "model"]
    # Of unit "matrix": weight (in, out) -> `factorisation.WeightOptions`. Of unit "layer": (`Projections`, `Sizes`) ->
    # `factorisation.Factorised`. Of unit "model": (`SourceModel`, token sequences, `Request`, `Workspace`) ->
    # `Factorisation`.
    factorise: Reference
    # Weights it factorises: of the attention, of feed-forward layers, of embeddings, which may also make the
    # predictions, of unembeddings. Other weights that are compressed beside them are factorised by "matrix".
    applies_to: tuple[str, ...] = (ATTENTION,)
    # in place of `factorise` where rotary embeddings or norms act between queries and keys
    rotary: Reference | None = None
    predicts_error: bool = True  # True if the errors of its options are known before a size is chosen
    in_bits: bool = False  # True if it spends a budget of bits, False for a budget of numbers
    counts_flops: bool = False  # True if its curves state the multiplications per token
    refuse: Reference | None = None  # `Sizes` of a model -> the reason why it cannot run, or None

    def reason_to_refuse(self, sizes: Any) -> str | None:
        """Return why a model of these sizes cannot be compressed by this method, or None."""
        reason: str | None = None if self.refuse is None else resolve(self.refuse)(sizes)
        return reason


def resolve(reference: Reference) -> Any:
    """Return the object that a row names."""
    return pkgutil.resolve_name(reference) if isinstance(reference, str) else reference


def register(method: Method) -> Method:
    """Add a row; a row of the same name is replaced."""
    (WITH_TEXT if method.unit == "model" else METHODS)[method.name] = method
    return method


for _row in (
    Method(
        name="calibrated",
        help="low-rank factors of each weight; components are ranked by their effect on the output, then fitted; "
        "requires --calibrate",
        unit="model",
        factorise=f"{_HERE}.calibration.calibrate:factorise_calibrated",
        applies_to=EVERYWHERE,
        counts_flops=True,
    ),
    Method(
        name="quantized",
        help="integers of 2 to 8 bits for each weight; bits are allocated by their effect on the output, and rounding "
        "errors compensate each other; requires --calibrate",
        unit="model",
        factorise=f"{_HERE}.calibration.quantize:factorise_quantized",
        applies_to=EVERYWHERE,
        in_bits=True,
    ),
    Method(
        name="heads",
        help="low-rank factors of the QK and OV operator of each head",
        unit="layer",
        factorise=f"{_HERE}.methods.decompositions:Heads",
        rotary=f"{_HERE}.methods.decompositions:ValueHeads",
    ),
    Method(
        name="matrix",
        help="low-rank factors of each weight matrix",
        unit="matrix",
        factorise=f"{_HERE}.methods.decompositions:TruncatedSVD",
        applies_to=EVERYWHERE,
    ),
    Method(
        name="ttm",
        help="each weight matrix as a TT-matrix of two cores",
        unit="matrix",
        factorise=f"{_HERE}.methods.decompositions:TruncatedTTMatrix",
        applies_to=(ATTENTION, FEED_FORWARD),
        refuse=f"{_HERE}.methods.decompositions:refuse_unsplittable",
    ),
    Method(
        name="tucker",
        help="each attention layer as one array (projection, head, d_model, d_head), by a truncated higher-order SVD",
        unit="layer",
        factorise=f"{_HERE}.methods.decompositions:TuckerStack",
        refuse=f"{_HERE}.methods.decompositions:refuse_unequal_widths",
    ),
    Method(
        name="cp",
        help="the array of tucker as a sum of rank-one components",
        unit="layer",
        factorise=f"{_HERE}.methods.decompositions:CPStack",
        predicts_error=False,
        refuse=f"{_HERE}.methods.decompositions:refuse_unequal_widths",
    ),
):
    register(_row)
