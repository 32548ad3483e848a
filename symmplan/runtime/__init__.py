"""From a captured program to agreed memory, and who holds which of its bytes until when."""
