from .by_layer import Comparison as Comparison
from .by_layer import Row as Row
from .by_layer import compare as compare
from .comparison_folder import write_comparison as write_comparison

__all__: list[str]
