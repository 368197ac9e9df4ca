"""Every method at several fractions: rows, what is refused, the table on disk and the picture."""
