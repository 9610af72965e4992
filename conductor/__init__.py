"""The scheduler: who should serve which prompt. It lands beside the store; nothing here yet."""
