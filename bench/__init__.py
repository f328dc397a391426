"""Benchmarks: each opens with its operation and byte count, then races the rivals in one run."""

import os

# Idle OpenMP threads sleep instead of spinning, or the rival that had its turn before would take cores from the next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
