"""Pure structures at C speed: no file, socket or clock, and for each a plain Python twin as its oracle."""
