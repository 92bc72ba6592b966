"""Workers as threads of this process."""
