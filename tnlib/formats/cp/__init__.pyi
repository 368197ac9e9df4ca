from .format import CP as CP

__all__: list[str]
