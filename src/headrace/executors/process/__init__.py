"""Workers as local processes."""
