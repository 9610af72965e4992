"""Choice of paths: pure structures at C speed, without I/O or a clock, each with a plain twin as oracle."""
