"""Fuzzing of all readers with mutated files made on the spot; `python -m fuzzing --help`."""
