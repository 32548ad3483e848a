"""Hand over to FSDP2: its gathers, reductions and parameters live in planned placements."""
