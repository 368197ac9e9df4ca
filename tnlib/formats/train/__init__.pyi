from .format import TensorTrain as TensorTrain
from .tt_matrix import TTMatrix as TTMatrix
from .vidal import Vidal as Vidal

__all__: list[str]
