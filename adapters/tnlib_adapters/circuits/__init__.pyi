from tnlib_adapters.circuits.chance import Score as Score
from tnlib_adapters.circuits.chance import composition_score as composition_score
from tnlib_adapters.circuits.composition import Compositions as Compositions
from tnlib_adapters.circuits.composition import compositions as compositions
from tnlib_adapters.circuits.composition import stream_moments as stream_moments
from tnlib_adapters.circuits.path_losses import PathLosses as PathLosses
from tnlib_adapters.circuits.path_losses import path_losses as path_losses
from tnlib_adapters.circuits.paths import PathContributions as PathContributions
from tnlib_adapters.circuits.paths import Paths as Paths
from tnlib_adapters.circuits.paths import path_contributions as path_contributions
from tnlib_adapters.circuits.paths import stream_by_order as stream_by_order
from tnlib_adapters.circuits.pictures import heat_map as heat_map

__all__: list[str]
