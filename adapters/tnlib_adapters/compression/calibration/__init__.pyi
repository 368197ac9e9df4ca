from .calibrate import calibrated_parts as calibrated_parts
from .calibrate import factorise_calibrated as factorise_calibrated
from .calibrate import fit_factors as fit_factors

__all__: list[str]
