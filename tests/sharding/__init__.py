"""Tests of layouts of leaves and trees."""
