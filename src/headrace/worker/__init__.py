"""The work on a task: evaluate the plan, seed, fetch, collate."""
