"""Experiments with several models: tests of significance, comparisons, tables."""
