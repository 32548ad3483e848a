"""Hand over: compiled graphs run in planned placements."""
