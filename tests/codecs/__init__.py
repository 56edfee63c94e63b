"""Tests of codecs."""
