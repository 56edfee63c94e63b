"""What codecs and adaptive batches do to training."""
