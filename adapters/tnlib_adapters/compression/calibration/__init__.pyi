from .calibrate import calibrated_parts as calibrated_parts
from .calibrate import components_of as components_of
from .calibrate import factorise_calibrated as factorise_calibrated
from .calibrate import fitted as fitted

__all__: list[str]
