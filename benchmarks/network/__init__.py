"""Training steps over a slow network between two hosts."""
