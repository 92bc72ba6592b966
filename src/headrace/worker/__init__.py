"""What a worker does with a task: evaluate the plan, seed, fetch, collate."""
