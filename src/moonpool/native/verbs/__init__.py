"""Our own binding of libibverbs, opened at run time: a machine without it builds and runs Moonpool."""
