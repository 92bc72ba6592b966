"""Statistics of a loader."""
