"""Effect of codecs and adaptive batches on training quality."""
