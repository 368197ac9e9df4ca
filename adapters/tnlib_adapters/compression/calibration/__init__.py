"""Calibrated methods: ranks by the effect on the model output, rounding, fits of blocks and of the model."""
