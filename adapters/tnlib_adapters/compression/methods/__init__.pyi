from .factorisation import Factorised as Factorised
from .table import METHODS as METHODS
from .table import TABLE as TABLE
from .table import Method as Method
from .table import register as register

__all__: list[str]
