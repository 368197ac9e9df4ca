from tnlib.drawing.graph import Bubble as Bubble
from tnlib.drawing.graph import Diagram as Diagram
from tnlib.drawing.graph import Leg as Leg
from tnlib.drawing.graph import Node as Node
from tnlib.drawing.graph import join as join
from tnlib.drawing.picture import Picture as Picture

__all__: list[str]
