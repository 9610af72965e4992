"""libfabric: endpoints, memory and one-sided transfers."""
