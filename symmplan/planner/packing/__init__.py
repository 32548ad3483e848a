"""Byte offsets for items that conflict: greedy orders, squeaky wheel, complete search."""
