from . import itensor as itensor
from . import quimb as quimb
from . import tenpy as tenpy

__all__: list[str]
