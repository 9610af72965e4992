"""Where segments are found by name: peer to peer, or in Redis."""
