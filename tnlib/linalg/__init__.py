"""Linear algebra of single matrices and modes: factorizations, rank truncation, scaling, threads, compiled kernels."""
