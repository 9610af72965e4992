"""Array kernels (numba): no I/O, no state, and no import of anything else of Moonpool's."""
