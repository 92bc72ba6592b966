"""The process and its surroundings: interrupts, torch's threads, rank and world size."""
