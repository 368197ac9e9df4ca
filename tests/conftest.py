"""One deterministic hypothesis profile: the same examples on every machine and in every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tnlib",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tnlib")
