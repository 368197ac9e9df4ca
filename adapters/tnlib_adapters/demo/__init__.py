"""Demonstration on a built-in model: compression beside rounding, pictures, findings about its heads."""

FOLDER = "tnlib-demo"  # here because the command line needs it before it imports numpy
