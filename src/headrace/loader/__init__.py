"""The `DataLoader` itself: its options, its samplers, and what frameworks ask of it."""

from headrace.loader.dataloader import DataLoader

__all__ = ["DataLoader"]
