"""Hand over to mixtures of experts: rows go to the ranks of their experts through one segment."""
