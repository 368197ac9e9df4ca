"""One matrix at a time: norms, rank choice, truncated SVD and its drivers, QR."""
