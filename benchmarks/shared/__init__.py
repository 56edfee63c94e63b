"""Models, rows of results and baselines that several benchmarks use."""
