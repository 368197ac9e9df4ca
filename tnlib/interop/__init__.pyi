from . import quimb as quimb

__all__: list[str]
