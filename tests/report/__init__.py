"""Tests of reports and timelines."""
