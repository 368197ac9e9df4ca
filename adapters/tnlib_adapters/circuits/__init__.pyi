from tnlib_adapters.circuits.block_diagram import block_diagram as block_diagram
from tnlib_adapters.circuits.block_diagram import feed_forward_diagram as feed_forward_diagram
from tnlib_adapters.circuits.chance import Score as Score
from tnlib_adapters.circuits.chance import composition_score as composition_score
from tnlib_adapters.circuits.composition import Compositions as Compositions
from tnlib_adapters.circuits.composition import compositions as compositions
from tnlib_adapters.circuits.composition import stream_moments as stream_moments
from tnlib_adapters.circuits.composition_diagrams import composition_diagram as composition_diagram
from tnlib_adapters.circuits.composition_diagrams import dense_diagram as dense_diagram
from tnlib_adapters.circuits.diagrams import frozen_diagram as frozen_diagram
from tnlib_adapters.circuits.diagrams import layer_diagram as layer_diagram
from tnlib_adapters.circuits.diagrams import ov_diagram as ov_diagram
from tnlib_adapters.circuits.diagrams import qk_diagram as qk_diagram
from tnlib_adapters.circuits.open_layer import OpenLayer as OpenLayer
from tnlib_adapters.circuits.open_layer import pair_effects as pair_effects
from tnlib_adapters.circuits.parts import StreamParts as StreamParts
from tnlib_adapters.circuits.parts import split_stream as split_stream
from tnlib_adapters.circuits.path_losses import PathLosses as PathLosses
from tnlib_adapters.circuits.path_losses import path_losses as path_losses
from tnlib_adapters.circuits.paths import PathContributions as PathContributions
from tnlib_adapters.circuits.paths import Paths as Paths
from tnlib_adapters.circuits.paths import path_contributions as path_contributions
from tnlib_adapters.circuits.paths import stream_by_order as stream_by_order
from tnlib_adapters.circuits.pictures import heat_map as heat_map
from tnlib_adapters.circuits.two_layers import TenTerms as TenTerms
from tnlib_adapters.circuits.two_layers import ten_terms as ten_terms

__all__: list[str]
