from tnlib_adapters import circuits as circuits
from tnlib_adapters.attention.attention import Attention as Attention
from tnlib_adapters.attention.changed import save_checkpoint as save_checkpoint
from tnlib_adapters.attention.checkpoint import Checkpoint as Checkpoint
from tnlib_adapters.attention.checkpoint import open_checkpoint as open_checkpoint
from tnlib_adapters.attention.fold_norms import norm_divisors as norm_divisors
from tnlib_adapters.attention.folding import Folded as Folded
from tnlib_adapters.attention.folding import fold as fold
from tnlib_adapters.attention.format_table import compare_formats as compare_formats
from tnlib_adapters.attention.frozen import FrozenAttention as FrozenAttention
from tnlib_adapters.attention.frozen_stack import FrozenPaths as FrozenPaths
from tnlib_adapters.attention.frozen_stack import FrozenStack as FrozenStack
from tnlib_adapters.attention.frozen_stack import freeze as freeze
from tnlib_adapters.attention.head_gauge import fix_gauge as fix_gauge
from tnlib_adapters.attention.head_gauge import head_order as head_order
from tnlib_adapters.attention.head_norm import HeadNorm as HeadNorm
from tnlib_adapters.attention.learned import PositionParts as PositionParts
from tnlib_adapters.attention.residual_product import ResidualProduct as ResidualProduct
from tnlib_adapters.attention.rotary import Rotary as Rotary
from tnlib_adapters.attention.rotation import rotate as rotate
from tnlib_adapters.attention.stacks import View as View
from tnlib_adapters.compression.compare import compare as compare
from tnlib_adapters.compression.compress import compress as compress
from tnlib_adapters.compression.evaluate import Evaluation as Evaluation
from tnlib_adapters.compression.evaluate import evaluate as evaluate
from tnlib_adapters.data.builtin import builtin_path as builtin_path

__all__: list[str]
