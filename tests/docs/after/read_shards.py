import headrace

dataset = headrace.TarDataset("train-*.tar", "jpg cls")
assert [dataset[place][0] for place in range(len(dataset))] == [image for image, _ in images]
