"""What `symmplan bench` runs: each benchmark is a module ``bench_<name>``, as a command is one.

Their models and launchers are in the other modules. Installed with symmplan, imported by none of
its modules but the command.
"""
