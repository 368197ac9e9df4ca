"""Single attention heads: what they attend to, read and write."""
