"""How batches cross from a worker's memory to the rank's."""
