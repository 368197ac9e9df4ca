"""Reference forward pass in float64 numpy, for every architecture of the table."""
