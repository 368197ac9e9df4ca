"""Calibrated methods: ranks by the effect on the model output, rounding, block-wise reconstruction."""
