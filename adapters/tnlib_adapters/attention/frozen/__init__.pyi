from .layer import FrozenAttention as FrozenAttention
from .residual_product import ResidualProduct as ResidualProduct
from .stack import FrozenPaths as FrozenPaths
from .stack import FrozenStack as FrozenStack

__all__: list[str]
