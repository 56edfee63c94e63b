"""Tests of what a new user does first."""
