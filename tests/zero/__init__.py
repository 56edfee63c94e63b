"""Tests of `Zero` and what it transforms."""
