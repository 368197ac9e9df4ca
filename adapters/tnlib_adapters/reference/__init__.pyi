from .model import loss as loss
from .model import run as run

__all__: list[str]
