from .heads import frozen_diagram as frozen_diagram
from .heads import layer_diagram as layer_diagram
from .heads import ov_diagram as ov_diagram
from .heads import qk_diagram as qk_diagram

__all__: list[str]
