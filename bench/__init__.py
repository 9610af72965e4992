"""Benchmarks: what moving bytes costs, always beside a peer and the physical limit."""
