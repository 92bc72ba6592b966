import numpy as np
from torch.utils.data import Dataset

import headrace


class Store:
    """Answers many requests at once."""

    asked = 0

    def get_many(self, keys):
        self.asked += 1
        return [key.encode() for key in keys]


def decode_jpeg(raw):
    return np.frombuffer(raw, np.uint8).astype(float)


def augment(image, generator):
    return image + generator.random()
