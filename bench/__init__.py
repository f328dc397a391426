"""Benchmarks. Each module states its operation and byte counts and measures all competitors in one run."""

import os

# Idle OpenMP threads sleep instead of spinning. Otherwise those of the last runner would take cores from the next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
