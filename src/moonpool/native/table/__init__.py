"""Pure structures at C speed: they hold no file, socket or clock, and each has a plain Python twin as its oracle."""
