"""Tests of tables that are looked up: their rows are sent, in place of the tables."""
