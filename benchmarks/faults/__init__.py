"""Runs that are killed, and continued."""
