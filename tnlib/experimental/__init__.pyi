from .spectral_radius import SpectralReduction as SpectralReduction
from .spectral_radius import spectral_reduction as spectral_reduction

__all__: list[str]
