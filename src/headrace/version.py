"""The package's version; its metadata are made from this line."""

__version__ = "0.1.0"
