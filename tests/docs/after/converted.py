from headrace import TarDataset

dataset = TarDataset("train-*.tar", fields="image.npy label.cls", decode={})
assert sorted((image.tolist(), label) for image, label in (dataset[place] for place in range(len(dataset)))) == sorted(
    zip(digits.images.tolist(), digits.target.tolist(), strict=True)
)
