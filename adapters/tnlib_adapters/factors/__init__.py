"""Factored matrices in checkpoints: their names, descriptions, storage and expansion."""

# roles of weights; read by the command line, which imports no numpy
ATTENTION, FEED_FORWARD, EMBEDDING, UNEMBEDDING = "attention", "feed_forward", "embedding", "unembedding"
