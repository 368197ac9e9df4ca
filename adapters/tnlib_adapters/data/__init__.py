"""Built-in trained models and their training data."""
