"""Far memory at C speed: DAX mappings, copies that outlive bad memory, memory bound to numa nodes."""
