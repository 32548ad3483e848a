"""Starts local ranks as processes: of the demo, of benchmarks, of checks and of tests."""
