"""Lists of raw cores: error budgets over bonds, dense arrays to cores and back, norms."""
