"""Tests of the jobs of the command line."""
