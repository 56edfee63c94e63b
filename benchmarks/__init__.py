"""Scripts that measure; run one as `python -m benchmarks.compiled.wire` from the root."""
