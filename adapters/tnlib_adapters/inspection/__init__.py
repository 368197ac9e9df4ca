"""Inspection page of a checkpoint: diagrams, composition, spectra, gauge freedom, attention patterns."""

PAGE = "inspect.html"  # here because the command line needs it before it imports numpy
