"""Measurements against other implementations, on the machine at hand."""
