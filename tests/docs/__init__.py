"""Tests that run the code of the documentation."""
