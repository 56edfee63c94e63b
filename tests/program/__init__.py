"""Tests of a traced program as operations."""
