"""Checkpoints to checkpoints that compute the same: norms folded, stream rotated, gauge fixed."""
