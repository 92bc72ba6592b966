import webdataset as wds

from headrace import DataLoader

urls = "train-{000..003}.tar"
