"""Path choice at C speed: rails, pure structures without I/O or a clock. Each has a plain Python twin as oracle."""
