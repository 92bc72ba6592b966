from pathlib import Path

import numpy as np
from PIL import Image

for number in range(8):
    folder = Path("pictures", "cat" if number % 2 else "dog")
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
Path("my_data.py").write_text("""import numpy as np


def make_dataset():
    return [(np.full((2, 2), number), number) for number in range(10)]
""")
