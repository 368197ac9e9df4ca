"""Error measures of compressed models: operator errors, and errors on text."""
