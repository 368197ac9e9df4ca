"""Raw arrays to the one representative of their gauge that tnlib returns."""
