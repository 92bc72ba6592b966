"""Helpers for the datasets that users write, and warnings about what does not survive a fork."""
