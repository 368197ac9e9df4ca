from .belief_propagation import Beliefs as Beliefs
from .belief_propagation import Gauged as Gauged
from .belief_propagation import gauge_loops as gauge_loops
from .belief_propagation import propagate_beliefs as propagate_beliefs
from .belief_propagation import truncate_gauged as truncate_gauged
from .contraction import ContractionCost as ContractionCost
from .contraction import contract as contract
from .contraction import contraction_cost as contraction_cost
from .contraction import derivative as derivative
from .contraction import poke_hole as poke_hole
from .hierarchical_tucker import tree as tree
from .network_builder import to_network as to_network
from .network_builder import to_quimb as to_quimb
from .network_format import Network as Network
from .network_format import is_isometry as is_isometry
from .network_format import isometry_error as isometry_error
from .network_format import spell_out as spell_out
from .network_reader import from_network as from_network
from .network_reader import from_quimb as from_quimb

__all__: list[str]
