"""Replay buffers: the API over the store."""
