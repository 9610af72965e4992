"""Batches over RDMA: rails to one peer, the bounce arena, and the run loop, in Cython."""
