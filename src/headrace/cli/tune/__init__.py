"""`headrace tune`: which settings feed a trainer best, and what limits them."""
