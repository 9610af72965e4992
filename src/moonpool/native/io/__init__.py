"""Cython over the operating system: memory, sockets, lanes, the target side."""
