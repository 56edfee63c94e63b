"""What is read from compiled programs: memory, launches, bytes, predicted time."""
