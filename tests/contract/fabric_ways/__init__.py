"""The ways of the contract suite whose regions have no address in their owner's process: files, devices."""
