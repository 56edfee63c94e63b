"""Fault injection: kill processes of a run, and check that it continues correctly."""
