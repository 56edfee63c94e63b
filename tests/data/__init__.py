"""Tests of data loading."""
