"""The words of the mesh as values: no I/O, no clock, nothing of ours but errors."""
