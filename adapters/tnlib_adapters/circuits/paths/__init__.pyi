from .attention_terms import OpenLayer as OpenLayer
from .attention_terms import TenTerms as TenTerms
from .attention_terms import pair_effects as pair_effects
from .attention_terms import ten_terms as ten_terms
from .contributions import PathContributions as PathContributions
from .contributions import Paths as Paths
from .contributions import path_contributions as path_contributions
from .contributions import stream_by_order as stream_by_order
from .logit_paths import LogitContributions as LogitContributions
from .logit_paths import logit_contributions as logit_contributions
from .path_ablation import PathLosses as PathLosses
from .path_ablation import path_losses as path_losses
from .stream_parts import StreamParts as StreamParts
from .stream_parts import split_stream as split_stream

__all__: list[str]
