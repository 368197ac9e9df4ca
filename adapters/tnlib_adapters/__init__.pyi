from tnlib_adapters.attention.attention import Attention as Attention
from tnlib_adapters.attention.attention import FrozenAttention as FrozenAttention
from tnlib_adapters.attention.checkpoint import Checkpoint as Checkpoint
from tnlib_adapters.attention.checkpoint import open_checkpoint as open_checkpoint
from tnlib_adapters.compression.compare import compare as compare
from tnlib_adapters.compression.compress import compress as compress
from tnlib_adapters.data.builtin import builtin_path as builtin_path

__all__: list[str]
