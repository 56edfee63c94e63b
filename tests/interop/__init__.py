"""Tests of checkpoints of PyTorch."""
