"""One-sided collectives on segments, as ops of torch."""
