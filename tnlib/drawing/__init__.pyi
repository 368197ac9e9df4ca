from .diagram import Bubble as Bubble
from .diagram import Diagram as Diagram
from .diagram import Leg as Leg
from .diagram import Node as Node
from .diagram import join as join
from .draw import Picture as Picture
from .draw import equation as equation
from .draw import sweep_steps as sweep_steps
from .einsums import einsum_diagram as einsum_diagram

__all__: list[str]
