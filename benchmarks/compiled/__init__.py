"""Figures read from compiled programs: memory, launches, bytes, predicted time."""
