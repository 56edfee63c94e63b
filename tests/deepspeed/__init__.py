"""Tests of DeepSpeed configurations."""
