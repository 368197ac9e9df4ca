"""Search for the terms of a model that a task needs."""
