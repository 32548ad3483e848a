"""What ranks tell each other: who they are, plans compared, errors that reach every rank."""
