"""The KV-cache store: who holds what. It lands on top of the transfer engine; nothing here yet."""
