from .diagram import Bubble as Bubble
from .diagram import Diagram as Diagram
from .diagram import Leg as Leg
from .diagram import Node as Node
from .diagram import join as join
from .einsums import einsum_diagram as einsum_diagram
from .equations import equation as equation
from .picture import Picture as Picture
from .sweeps import sweep_steps as sweep_steps

__all__: list[str]
