assert sum(len(labels) for _, labels in loader) == 128
