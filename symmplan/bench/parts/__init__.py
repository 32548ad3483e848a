"""What the benchmarks are made of; see `symmplan.bench`."""
