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
from tnlib.io import load as load
from tnlib.io import save as save
from tnlib.ops.round import round as round

__version__: str
__all__: list[str]
