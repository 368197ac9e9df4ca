from .chance_level import Score as Score
from .chance_level import composition_score as composition_score
from .head_pairs import Compositions as Compositions
from .head_pairs import compositions as compositions
from .head_pairs import stream_moments as stream_moments
from .subspaces import Angles as Angles
from .subspaces import Overlaps as Overlaps
from .subspaces import head_subspace as head_subspace
from .subspaces import principal_angles as principal_angles
from .subspaces import subspace_overlaps as subspace_overlaps

__all__: list[str]
