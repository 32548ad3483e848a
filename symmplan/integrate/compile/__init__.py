"""Hand over to compiled graphs: a backend of `torch.compile`."""
