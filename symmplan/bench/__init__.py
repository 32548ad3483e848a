"""What `symmplan bench` runs: each benchmark is a module, as a command is one.

What they share, and their models and sides, is in `symmplan.bench.parts`.
"""
