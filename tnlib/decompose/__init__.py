"""Dense arrays to formats; every function returns a `Fit`."""
