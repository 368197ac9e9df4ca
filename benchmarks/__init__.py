"""What the library costs beside its peers: `make bench` measures, and writes docs/benchmarks.md."""
