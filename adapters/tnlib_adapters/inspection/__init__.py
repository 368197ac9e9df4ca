"""What is inside a checkpoint, as one page: diagrams, compositions, spectra, gauges, patterns on a text."""
