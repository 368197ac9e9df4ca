"""Frozen models: attention patterns, norm divisors and feed-forward slopes fixed, an affine map of the stream."""
