from pathlib import Path

from PIL import Image

for kind, colour in (("cat", "grey"), ("dog", "brown")):
    Path("FOLDER/train", kind).mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (40, 30), colour).save(f"FOLDER/train/{kind}/{number}.jpg")
