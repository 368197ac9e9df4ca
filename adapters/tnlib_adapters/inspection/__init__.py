"""Inspection page of a checkpoint: diagrams, composition, spectra, gauge freedom, attention patterns."""
