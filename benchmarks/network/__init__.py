"""Steps over a slow network between two hosts."""
