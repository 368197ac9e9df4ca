"""Calibration statistics of weights: moments of inputs and output gradients, losses of components, their files."""
