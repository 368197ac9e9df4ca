from .by_layer import Comparison as Comparison
from .by_layer import Row as Row
from .by_layer import compare as compare

__all__: list[str]
