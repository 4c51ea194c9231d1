"""Benchmarks, each run by name from the repository's root: `python -m benchmarks.stream`."""
