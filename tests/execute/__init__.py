"""Tests of one device's step."""
