assert sum(1 for batch in loader) == len(loader) > 0
