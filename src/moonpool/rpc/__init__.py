"""MessagePack-RPC between the store's master, its nodes and its clients: shells over the native loop."""
