"""Messages between the rank and a worker process."""
