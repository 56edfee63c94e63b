"""Tests of SimiGrad."""
