from tnlib_adapters.circuits.chance import Score as Score
from tnlib_adapters.circuits.chance import composition_score as composition_score
from tnlib_adapters.circuits.composition import Compositions as Compositions
from tnlib_adapters.circuits.composition import compositions as compositions
from tnlib_adapters.circuits.composition import stream_moments as stream_moments
from tnlib_adapters.circuits.pictures import heat_map as heat_map

__all__: list[str]
