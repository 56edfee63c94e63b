"""Tests of the porting pages."""
