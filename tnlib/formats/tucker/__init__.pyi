from .format import Tucker as Tucker

__all__: list[str]
