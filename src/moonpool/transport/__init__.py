"""One file per way to move bytes, behind one table."""
