"""Benchmarks that measure time."""
