"""Loaders that the user's function makes, and others like them with other arguments."""
