class Images(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 128

    def __getitem__(self, index):
        return index
