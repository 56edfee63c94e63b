"""Tests of `Zero.verify`."""
