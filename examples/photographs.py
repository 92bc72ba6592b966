"""What the examples with photographs share: pictures in JPEG files, transforms in plain torch, a network, the start.

python examples/photographs.py FOLDER writes the pictures, cut from photographs of scikit-learn and scikit-image.
"""

import os
import random
import sys
from pathlib import Path

import skimage
import torch
import torch.distributed as dist
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn.functional import interpolate

FILES = "astronaut.png", "chelsea.png", "coffee.png", "retina.jpg", "rocket.jpg"
CUT, HEIGHT, SIDE = 96, 256, 64  # pixels: of a picture, of a photograph, of what the network sees
COUNTS = {"train": 35, "val": 11}  # pictures of a class


def write(folder):
    """Write FOLDER/train/CLASS/0000.jpg and so on, and FOLDER/val: 245 and 77 pictures, the same ones in every run."""
    photographs = {Path(name).stem: Image.open(Path(skimage.data_dir, name)) for name in FILES}
    photographs |= dict(zip(("china", "flower"), map(Image.fromarray, load_sample_images().images), strict=True))
    draw = random.Random(0)
    for name, photograph in photographs.items():
        whole = photograph.convert("RGB").resize((photograph.width * HEIGHT // photograph.height, HEIGHT))
        for part, count in COUNTS.items():
            Path(folder, part, name).mkdir(parents=True)
            for number in range(count):
                left, top = draw.randrange(whole.width - CUT), draw.randrange(HEIGHT - CUT)
                cut = whole.crop((left, top, left + CUT, top + CUT))
                cut.save(Path(folder, part, name, f"{number:04}.jpg"), quality=90)
    broken = Path(folder, "train", "rocket", "0007.jpg")
    broken.write_bytes(broken.read_bytes()[:2000])  # as an interrupted download leaves a file


def resized(image):
    """Return an image of uint8, shape (3, height, width), as float32 of shape (3, SIDE, SIDE)."""
    return interpolate(image[None] / 64 - 2, (SIDE, SIDE), mode="bilinear", antialias=True)[0]


def random_resized_crop(image):
    """Return a part of an image, or its mirror image: 30% to 100% of its pixels, of a shape between 3:4 and 4:3."""
    size = torch.tensor(image.shape[1:])
    area, ratio = size.prod() * torch.empty(()).uniform_(0.3, 1), torch.empty(()).uniform_(-0.28, 0.28).exp()
    high, wide = torch.minimum(torch.stack([area / ratio, area * ratio]).sqrt().long(), size).tolist()
    top, left = (torch.rand(2) * (size - torch.tensor([high, wide]) + 1)).long().tolist()
    cut = resized(image[:, top : top + high, left : left + wide])
    return cut.flip(2) if torch.rand(()) < 0.5 else cut


def network(classes):
    """Return a small network for images of shape (3, SIDE, SIDE), the same one on every rank."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, classes))


def start(folder):
    """Join the other ranks, let rank 0 write the pictures if `folder` is missing, and return the rank's device.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which ranks there are. Without them the process is alone.
    """
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)
    if dist.get_rank() == 0 and not os.path.exists(folder):
        write(folder)
    dist.barrier()
    return device


if __name__ == "__main__":
    write(sys.argv[1])
