"""Tar shards: their members, samples, and files of columns for an index."""
