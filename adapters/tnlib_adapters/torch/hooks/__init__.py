"""A running model, seen from inside and fitted layer by layer; what stands below compression."""
