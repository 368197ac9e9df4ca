from tnlib._errors import ArgumentError as ArgumentError
from tnlib._errors import ArgumentTypeError as ArgumentTypeError
from tnlib._errors import ConvergenceWarning as ConvergenceWarning
from tnlib._errors import DegenerateCutWarning as DegenerateCutWarning
from tnlib._errors import FileFormatError as FileFormatError
from tnlib._errors import MissingFileError as MissingFileError
from tnlib._errors import TnlibError as TnlibError
from tnlib._fit import Fit as Fit
from tnlib.decompose.cp import cp as cp
from tnlib.decompose.svd import svd as svd
from tnlib.decompose.tt_svd import tt_svd as tt_svd
from tnlib.decompose.tt_svd import ttm_svd as ttm_svd
from tnlib.decompose.tucker import tucker as tucker
from tnlib.formats.cp import CP as CP
from tnlib.formats.kronecker import KroneckerTerms as KroneckerTerms
from tnlib.formats.low_rank import LowRank as LowRank
from tnlib.formats.svd import SVD as SVD
from tnlib.formats.train import TensorTrain as TensorTrain
from tnlib.formats.train import TTMatrix as TTMatrix
from tnlib.formats.tucker import Tucker as Tucker
from tnlib.formats.vidal import Vidal as Vidal
from tnlib.io import load as load
from tnlib.io import save as save
from tnlib.ops.canonicalize import canonicalize as canonicalize
from tnlib.ops.canonicalize import isometry_errors as isometry_errors
from tnlib.ops.canonicalize import vidal as vidal
from tnlib.ops.convert import convert as convert
from tnlib.ops.inner import distance as distance
from tnlib.ops.inner import inner as inner
from tnlib.ops.round import round as round
from tnlib.ops.schmidt import correlation_length as correlation_length
from tnlib.ops.schmidt import entanglement_spectrum as entanglement_spectrum
from tnlib.ops.schmidt import entropy as entropy
from tnlib.ops.schmidt import schmidt_values as schmidt_values
from tnlib.ops.schmidt import truncate_bond as truncate_bond

__version__: str
__all__: list[str]
