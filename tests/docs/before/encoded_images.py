import io

import numpy as np
from PIL import Image

images = []
for number in range(20):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file, "JPEG")
    images.append((file.getvalue(), number % 3))
