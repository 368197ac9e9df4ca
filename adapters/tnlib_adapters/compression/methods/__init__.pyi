from .table import METHODS as METHODS
from .table import REFUSE as REFUSE
from .table import TURNED as TURNED
from .table import UNPREDICTED as UNPREDICTED
from .table import Factorised as Factorised

__all__: list[str]
