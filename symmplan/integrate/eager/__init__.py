"""Hand over to eager programs: record an iteration, then serve the declared ops of later ones."""
