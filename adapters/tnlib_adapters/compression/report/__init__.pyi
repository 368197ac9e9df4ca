from .report import SUBJECTS as SUBJECTS
from .report import HeadReport as HeadReport
from .report import LayerReport as LayerReport
from .report import Report as Report

__all__: list[str]
