"""Tar shards: their members, by index."""
