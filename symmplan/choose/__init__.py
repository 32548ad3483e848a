"""How each collective runs: measured in the program, read from a table, or ruled."""
