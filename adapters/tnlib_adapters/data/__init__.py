"""The built-in trained models, and the sequences they were trained on."""
