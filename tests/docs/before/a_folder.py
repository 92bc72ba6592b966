from types import SimpleNamespace

import headrace


def scan(root):
    return [(f"{root}/{number}.jpg", number % 2) for number in range(100)]


self, root = SimpleNamespace(), "pictures"
