"""Benchmarks: each opens with its operation and byte count, then races the rivals in one run."""
