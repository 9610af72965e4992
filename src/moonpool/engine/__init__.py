"""The transfer engine: segments, batches, and the paths that carry them."""
