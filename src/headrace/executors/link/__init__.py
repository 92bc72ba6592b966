"""What the rank and a worker process send each other, and how."""
