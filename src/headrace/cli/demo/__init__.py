"""`headrace demo`: the ranks that it starts, what they do, and what is checked."""
