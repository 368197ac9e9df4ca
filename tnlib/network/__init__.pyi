from tnlib.network.build import to_network as to_network
from tnlib.network.contraction import contract as contract
from tnlib.network.copies import spell_out as spell_out
from tnlib.network.cost import Cost as Cost
from tnlib.network.cost import contraction_cost as contraction_cost
from tnlib.network.hole import derivative as derivative
from tnlib.network.hole import poke_hole as poke_hole
from tnlib.network.loops import Gauged as Gauged
from tnlib.network.loops import gauge_loops as gauge_loops
from tnlib.network.recognise import from_network as from_network
from tnlib.network.special import delta as delta
from tnlib.network.special import flattening as flattening
from tnlib.network.special import identity as identity
from tnlib.network.special import is_isometry as is_isometry
from tnlib.network.special import isometry_error as isometry_error
from tnlib.network.special import swap as swap
from tnlib.network.trees import tree as tree
from tnlib.network.value import Network as Network

__all__: list[str]
