"""Which worker computes which task, on whatever workers: queue, credits, second copies, deaths, replacement."""
