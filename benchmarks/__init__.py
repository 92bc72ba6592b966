"""Figures: each a ratio against a named rival, in the same run, on the same work."""
