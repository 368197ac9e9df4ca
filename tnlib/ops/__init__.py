"""Verbs for every format. Each validates its arguments and calls the implementation that the format has registered."""
