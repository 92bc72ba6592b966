import torch


def train(images, labels):
    return (images.sum() + labels.sum()).float()


torch_loader = torch.utils.data.DataLoader(dataset, batch_size=64)
