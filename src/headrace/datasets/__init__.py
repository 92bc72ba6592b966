"""Helpers for users' datasets, and warnings about objects that do not survive a fork."""
