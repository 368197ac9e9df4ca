"""Cost of a compression before it runs: passes, seconds, memory and disk."""
