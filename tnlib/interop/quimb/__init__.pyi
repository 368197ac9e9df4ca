from .belief_propagation import Gauged as Gauged
from .belief_propagation import gauge_loops as gauge_loops
from .contraction import contract as contract
from .contraction_order import Cost as Cost
from .contraction_order import contraction_cost as contraction_cost
from .copy_tensors import spell_out as spell_out
from .derivatives import derivative as derivative
from .derivatives import poke_hole as poke_hole
from .from_quimb import from_network as from_network
from .gauge_truncation import truncate_gauged as truncate_gauged
from .graphical_models import Beliefs as Beliefs
from .graphical_models import propagate_beliefs as propagate_beliefs
from .hierarchical_tucker import tree as tree
from .isometry import is_isometry as is_isometry
from .isometry import isometry_error as isometry_error
from .network_format import Network as Network
from .to_quimb import to_network as to_network

__all__: list[str]
