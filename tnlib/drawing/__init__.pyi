from tnlib.drawing.einsums import einsum_diagram as einsum_diagram
from tnlib.drawing.equations import equation as equation
from tnlib.drawing.graph import Bubble as Bubble
from tnlib.drawing.graph import Diagram as Diagram
from tnlib.drawing.graph import Leg as Leg
from tnlib.drawing.graph import Node as Node
from tnlib.drawing.graph import join as join
from tnlib.drawing.picture import Picture as Picture
from tnlib.drawing.steps import sweep_steps as sweep_steps

__all__: list[str]
