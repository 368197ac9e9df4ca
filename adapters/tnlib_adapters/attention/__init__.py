"""Arrays to operators: QK and OV circuits in homogeneous coordinates, frozen attention."""
