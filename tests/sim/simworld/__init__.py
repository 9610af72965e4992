"""A seeded world for the store.

Its production cores between modelled processes, network, memory and Redis.
"""
