"""Tests of meshes."""
