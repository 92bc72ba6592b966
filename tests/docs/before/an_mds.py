from sklearn.datasets import load_digits
from streaming import MDSWriter

digits = load_digits()
with MDSWriter(out="mds", columns={"image": "ndarray:float64:8,8", "label": "int"}) as writer:
    for image, label in zip(digits.images, digits.target, strict=True):
        writer.write({"image": image, "label": int(label)})
