from .calibrate import calibrated_parts as calibrated_parts
from .calibrate import factorise_calibrated as factorise_calibrated
from .calibrate import fit_factors as fit_factors
from .selected_weights import components_of as components_of

__all__: list[str]
