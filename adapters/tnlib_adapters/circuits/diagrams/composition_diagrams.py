"""Tensor network diagrams of composed heads: composition terms, and the ten terms of two layers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, get_args

from tnlib import ArgumentError
from tnlib._validate import check_choice, is_list, is_one_of
from tnlib.drawing import Bubble, Diagram, Leg, Node
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.arguments import READS, AttentionHead, Kind, as_two_heads
from tnlib_adapters.circuits.diagrams.attention_diagrams import (
    REACH,
    STEP,
    chain,
    offsets_label,
    output_value,
    query_key,
    read_stream,
    refuse_norm,
    rotation_legs,
    stream_copy,
    turned,
)
from tnlib_adapters.circuits.paths.attention_terms import NAMES

Layers = tuple[int, int] | None
_DROP = 1.4  # distance from the stream down to its pattern
_OPEN_LEG = 1.4  # length of an open leg that leaves the bubble


def composition_diagram(kind: Kind, later: AttentionHead, earlier: AttentionHead, *, layers: Layers = None) -> Diagram:
    r"""Return the diagram of one composition term: a head that reads, as query, key or value, an earlier head's output.

    Parameters
    ----------
    kind
        "Q" and "K" are terms of the later head's scores, with the pattern of the earlier head on that side, before the
        score scale, which the title states; biases belong to the side that reads the stream. "K" is the virtual
        induction head if the earlier head attends to the previous token. "V" is the virtual head,
        :math:`A^2 A^1 \otimes` the product of the weights.
    later, earlier
        (layer, head).
    layers
        Numbers of the layers of the later and the earlier head, for the title and the labels. None: the title has the
        heads alone, and the superscripts of the labels are 2 and 1.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the kind is unknown, a layer is not an Attention or has no such head, d_model differs, or the scores are not
        a bilinear form.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> later, earlier = (model.attention(1), 0), (model.attention(0), 2)
    >>> term = composition_diagram("K", later, earlier, layers=(1, 0))
    >>> [node.label.split()[0] for node in term.nodes if node.kind == "matrix"][-1]
    'A$^{0}$'
    >>> term.title
    'K-composition: scores of head 1.0 whose keys read head 0.2, times 0.25'
    """
    check_choice("composition_diagram", "kind", kind, get_args(Kind))
    reader, writer = _two_heads("composition_diagram", later, earlier, layers)
    if kind == "V":
        title = f"V-composition: {reader.name} after {writer.name}, a virtual head"
        return replace(_virtual_head(reader, writer), title=title)
    refuse_norm("composition_diagram", reader.layer)
    side = "queries" if kind == "Q" else "keys"
    scale = f"times {reader.layer.scale:.4g}"
    title = f"{kind}-composition: scores of {reader.name} whose {side} read {writer.name}, {scale}"
    nodes, legs, (query, key) = _score_row(reader, writer, kind)
    right = max(node.position[0] for node in nodes)
    ends = [
        Leg(query, None, "query", None, (-REACH, nodes[query].position[1]), axes=(0, None)),
        Leg(key, None, "key", None, (right + REACH, nodes[key].position[1]), axes=(0, None)),
    ]
    return Diagram((*nodes,), (*ends, *legs), title)


class _DrawnHead(NamedTuple):
    """A head, the superscript of its weights and pattern, and its name in titles and on its leg."""

    layer: Attention
    head: int
    number: str
    name: str

    @property
    def pattern(self) -> str:
        return f"A$^{self.number}$"

    def labelled(self, drawn: tuple[list[Node], list[Leg]]) -> tuple[list[Node], list[Leg]]:
        """Return the nodes of its weights with their superscript, and their legs with its name."""
        nodes = [replace(node, label=node.label.replace("$_", f"$^{self.number}_")) for node in drawn[0]]
        return nodes, [replace(leg, name=self.name) if leg.name == f"head {self.head}" else leg for leg in drawn[1]]


def _two_heads(
    function: str, later: AttentionHead, earlier: AttentionHead, layers: Layers
) -> tuple[_DrawnHead, _DrawnHead]:
    """Return the later and the earlier head with the numbers of their layers; 2 and 1 where these are not given."""
    (last, h), (first, g) = as_two_heads(function, later, earlier)
    if layers is None:
        return _DrawnHead(last, h, "2", f"head {h}"), _DrawnHead(first, g, "1", f"head {g}")
    if not is_list(layers) or len(layers) != 2 or not 0 <= layers[1] < layers[0]:
        raise ArgumentError(
            f"{function}: layers must be the numbers of the later and the earlier layer, got {layers!r}; pass for "
            "example (16, 3)."
        )
    k, j = layers
    return _DrawnHead(last, h, f"{{{k}}}", f"head {k}.{h}"), _DrawnHead(first, g, f"{{{j}}}", f"head {j}.{g}")


def _virtual_head(later: _DrawnHead, earlier: _DrawnHead) -> Diagram:
    """Return the diagram of A^2 A^1 (x) W_O^2 W_V^2 W_O^1 W_V^1, with bonds d_head."""
    last, first = later.layer, earlier.layer
    weights_2, inner_2 = later.labelled(chain(output_value(last, later.head, "V"), last.d_value, 0.0, -1.4, first=2))
    pieces = output_value(first, earlier.head)
    weights_1, inner_1 = earlier.labelled(chain(pieces, first.d_value, 2 * STEP, -1.4, first=4))
    patterns = (Node("matrix", head.pattern, (x * STEP, 0.0)) for head, x in ((later, 0.5), (earlier, 2.5)))
    nodes = [*patterns, *weights_2, *weights_1]
    end = 3 * STEP + REACH
    legs = [
        Leg(0, None, "to", None, (-REACH, 0.0)),
        Leg(0, 1, "position"),
        Leg(1, None, "from", None, (end, 0.0)),
        Leg(2, None, "written", last.d_model, (-REACH, -1.4), axes=(2, None)),
        *inner_2,
        Leg(3, 4, "stream", last.d_model, axes=(1, 2)),
        *inner_1,
        Leg(5, None, "read", read_stream(first, "V")[1], (end, -1.4), axes=(1, None)),
    ]
    return Diagram((*nodes,), (*legs,))


def term_diagram(name: str, later: AttentionHead, earlier: AttentionHead, *, layers: Layers = None) -> Diagram:
    r"""Return the diagram of one of the ten terms of two layers, for a pair of heads.

    Contracted, the bubble holds a term of the scores, before the score scale, which the title states. The function of
    the bubble is the change of the attention pattern when this term T is removed: with S, all scores of the later head,
    and their scale c, :math:`\mathrm{softmax}(S) - \mathrm{softmax}(S - c T)`, masked as in the layer. If neither
    queries nor keys read the earlier head, ALiBi or the relative bias belong to the term, and the label states them.

    Parameters
    ----------
    name
        As in `ten_terms`: "direct", "first", "second"; "Q", "K", "V", "QK", "QV", "KV", "QKV" name the sides of the
        later head that read the earlier one; the other sides read the stream. "K" is the virtual induction head if the
        earlier head attends to the previous token.
    later, earlier
        (layer, head).
    layers
        Numbers of the layers of the later and the earlier head, for the title and the labels. None: the title has the
        heads alone, and the superscripts of the labels are 2 and 1.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the name is unknown, a layer is not an Attention or has no such head, d_model differs, or the scores are not
        a bilinear form.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> heads = (model.attention(1), 0), (model.attention(0), 3)
    >>> [
    ...     sum(node.label == "A$^1$" for node in term_diagram(name, *heads).nodes)
    ...     for name in ("second", "K", "QKV")
    ... ]
    [0, 1, 3]
    >>> term_diagram("K", *heads).bubbles[0].label
    'change of the pattern'
    """
    if not is_one_of(name, NAMES):
        raise ArgumentError(f"term_diagram: name must be one of {', '.join(NAMES)}, got {name!r}; choose one.")
    reader, writer = _two_heads("term_diagram", later, earlier, layers)
    of_layer = ("", "") if layers else (" of the first layer", " of the second layer")
    if name == "direct":
        return _direct(reader)
    if name == "first":
        return replace(_earlier_alone(writer), title=f"first: {writer.name}{of_layer[0]} alone")
    refuse_norm("term_diagram", reader.layer)
    sides = "" if name == "second" else name
    composed_sides = " and ".join(
        ", ".join(label for letter, label in READS.items() if letter in sides).rsplit(", ", 1)
    )
    alone = f"second: {reader.name}{of_layer[1]} alone"
    title = f"{name}: the {composed_sides} of {reader.name} read {writer.name}" if sides else alone
    return replace(_later(reader, writer, sides), title=f"{title}; scores times {reader.layer.scale:.4g}")


def _direct(head: _DrawnHead) -> Diagram:
    """Return the diagram of the input stream, plus the output bias of the later layer, which belongs to no head."""
    title, later = "direct: the input stream", head.layer
    if later.b_O is None:
        return Diagram((Node("tensor", "x", (0.0, 0.0)),), (*stream_copy(0, (0.0, 0.0), None, later.d_model),), title)
    nodes = [Node("tensor", label, (0.0, y)) for label, y in (("x", 0.0), (f"b$^{head.number}_O$", -1.1))]
    total = (-STEP, 0.0)
    legs = [
        Leg(0, 2, "position", via=((-0.2, 0.25), (-STEP + 0.1, 0.25))),
        Leg(0, 2, "stream", later.d_model),
        Leg(1, 2, "", later.d_model, via=((-STEP, -1.1),)),
        *stream_copy(2, total, None, later.d_model),
    ]
    return Diagram((*nodes, Node("function", "+", total)), (*legs,), f"{title}, and the bias of the output")


def _earlier_alone(earlier: _DrawnHead) -> Diagram:
    right = 2 * STEP
    nodes, legs = _value_row(earlier, earlier, (right, 0.0), 0, composed=False)
    pattern, at = len(nodes), len(nodes) - 1  # at: the node x
    legs = [
        Leg(pattern, None, "position", None, (-REACH, _DROP), axes=(0, None)),
        Leg(0, None, "stream", earlier.layer.d_model, (-REACH, 0.0), axes=(2, None)),
        *legs,
        Leg(at, pattern, "source", axes=(0, 1)),
    ]
    return Diagram((*nodes, Node("matrix", earlier.pattern, (right, _DROP))), (*legs,))


def _later(later: _DrawnHead, earlier: _DrawnHead, sides: str) -> Diagram:
    """Return the diagram of the later head: scores in a row from query to key, values below."""
    later_layer = later.layer
    nodes, inner, (query, key) = _score_row(later, earlier, sides)
    right_end = max(node.position[0] for node in nodes)
    floor = min(node.position[1] for node in nodes) - (2.8 if "V" in sides else 1.6)
    # the first parts of queries and keys, the embedding, hold what depends on the distance alone
    offsets = "" if "Q" in sides or "K" in sides else offsets_label(later_layer)
    label = "change of the pattern" + (f", scores{offsets}" if offsets else "")
    bubble = Bubble(tuple(range(len(nodes))), label)
    first = len(nodes)
    values, value_legs = _value_row(later, earlier, (right_end, floor), first, composed="V" in sides)
    left = min(-_OPEN_LEG, values[0].position[0] - REACH)
    legs = [
        Leg(query, None, "position", None, (left, nodes[query].position[1]), axes=(0, None)),
        Leg(key, first + len(values) - 1, "key", axes=(0, 0)),
        Leg(first, None, "stream", later_layer.d_model, (left, floor), axes=(2, None)),
        *inner,
        *value_legs,
    ]
    return Diagram((*nodes, *values), (*legs,), "", (bubble,))


def _score_row(later: _DrawnHead, earlier: _DrawnHead, sides: str) -> tuple[list[Node], list[Leg], tuple[int, int]]:
    """Return the row from the query's x to the key's x, and the nodes where the positions of query and key end.

    A side in `sides` reads the earlier head, without its bias: the constant coordinate belongs to the stream.
    """
    later_layer, earlier_layer = later.layer, earlier.layer
    query, inner_q = _output_row(earlier, STEP, 0.0, first=1, mirrored=True) if "Q" in sides else ([], [])
    first = 1 + len(query)
    pieces = query_key(later_layer, later.head, sides)
    row, inner = later.labelled(chain(pieces, later_layer.d_head, first * STEP, 0.0, first=first))
    next_node = first + len(row)
    key, inner_k = _output_row(earlier, next_node * STEP, 0.0, first=next_node) if "K" in sides else ([], [])
    last = next_node + len(key)
    (x_q, d_q), (x_k, d_k) = (
        read_stream(*((earlier_layer, "V") if letter in sides else (later_layer, letter))) for letter in "QK"
    )
    nodes = [Node("tensor", x_q, (0.0, 0.0)), *query, *row, *key, Node("tensor", x_k, (last * STEP, 0.0))]
    legs = [
        *inner_q,
        *inner,
        *inner_k,
        Leg(0, 1, "stream", d_q, axes=(1, 1)),
        Leg(last - 1, last, "stream", d_k, axes=(1, 1)),
    ]
    ends = [0, last]
    for side, (letter, before, end) in enumerate((("Q", first - 1, 0), ("K", next_node - 1, last))):
        if letter in sides:
            legs.append(
                Leg(before, before + 1, "stream", later_layer.d_model, axes=(2, 1) if letter == "Q" else (1, 2))
            )
            legs.append(Leg(end, len(nodes), "source", axes=(0, 1)))
            ends[side] = len(nodes)
            nodes.append(Node("matrix", earlier.pattern, (nodes[end].position[0], -_DROP)))
    if later_layer.rotary is not None:
        for side, end in enumerate(ends):
            x, y = nodes[end].position
            legs.append(Leg(end, len(nodes), "", axes=(0, None)))
            ends[side] = len(nodes)
            nodes.append(Node("delta", "", (x, y - 1.0)))
        legs += rotation_legs(nodes, *ends)
    return nodes, legs, (ends[0], ends[1])


def _value_row(
    later: _DrawnHead, earlier: _DrawnHead, end: tuple[float, float], first: int, *, composed: bool
) -> tuple[list[Node], list[Leg]]:
    """Return the output row, left to right, ending in the node with the attended position."""
    later_layer, earlier_layer, (right_end, floor) = later.layer, earlier.layer, end
    width, linear = (4, "V") if composed else (2, "")
    pieces = output_value(later_layer, later.head, linear)
    nodes, legs = later.labelled(chain(pieces, later_layer.d_value, right_end - width * STEP, floor, first=first))
    axes = (1, 2) if composed else (1, 1)
    legs.append(Leg(first + 1, first + 2, "stream", read_stream(later_layer, "V", linear)[1], axes=axes))
    if not composed:
        return [*nodes, Node("tensor", read_stream(later_layer, "V")[0], (right_end, floor))], legs
    more, inner = _output_row(earlier, right_end - 2 * STEP, floor, first=first + 2)
    nodes = [*nodes, *more, Node("tensor", read_stream(earlier_layer, "V")[0], (right_end, floor))]
    nodes.append(Node("matrix", earlier.pattern, (right_end, floor + _DROP)))
    legs += [
        *inner,
        Leg(first + 3, first + 4, "stream", read_stream(earlier_layer, "V")[1], axes=(1, 1)),
        Leg(first + 4, first + 5, "source", axes=(0, 1)),
    ]
    return nodes, legs


def _output_row(
    earlier: _DrawnHead, x: float, y: float, *, first: int, mirrored: bool = False
) -> tuple[list[Node], list[Leg]]:
    """Return W_O W_V of the earlier head in a row; `mirrored` puts W_V first."""
    pieces = output_value(earlier.layer, earlier.head)
    return earlier.labelled(chain(turned(pieces) if mirrored else pieces, earlier.layer.d_value, x, y, first=first))
