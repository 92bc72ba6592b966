"""The pictures of imagenet_folder.py from tar shards: the same samples on any number of ranks and nodes.

torchrun --nproc-per-node=2 examples/imagenet_shards.py FOLDER    or with python alone, as one process

Two nodes of 8 GPUs that both see FOLDER; torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process:
torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=NODE0 examples/imagenet_shards.py FOLDER
torchrun --nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=NODE0 examples/imagenet_shards.py FOLDER
"""

import hashlib
import random
import sys
from pathlib import Path

import photographs
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from headrace import DataLoader, ShardWriter, TarDataset

EPOCHS, GLOBAL_BATCH = 2, 16


def pack(folder):  # much as: headrace pack FOLDER/train 'FOLDER/train-%03d.tar' --maxcount 50 --shuffle 0
    files = sorted(Path(folder, "train").glob("*/*.jpg"))
    classes = sorted({file.parent.name for file in files})
    random.Random(0).shuffle(files)  # so that no shard holds one class alone
    with ShardWriter(f"{folder}/train-%03d.tar", maxcount=50) as writer:
        for file in files:
            name = file.parent.name
            writer.write({"__key__": f"{name}/{file.stem}", "jpg": file.read_bytes(), "cls": classes.index(name)})


def for_training(sample):
    image, label = sample
    return photographs.random_resized_crop(image), label


def main(folder):
    device = photographs.start(folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0 and not Path(folder, "train-000.tar").exists():
        pack(folder)
    dist.barrier()  # where nodes do not share a file system, write the same shards on each beforehand

    train = TarDataset(f"{folder}/train-*.tar", "jpg cls", decode="torchrgb8", transform=for_training)
    options = {"num_workers": 1, "persistent_workers": True, "device": device}
    loader = DataLoader(train, GLOBAL_BATCH // ranks, shuffle=True, seed=0, on_error="replace", **options)
    loader.verify()  # an error on all nodes if they have shards with different numbers of samples

    model = DistributedDataParallel(photographs.network(len(photographs.FILES) + 2).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        read = []  # a digest of each sample that this rank reads: its key, its label, all bits of its crop
        for images, labels in loader:
            for key, label, image in zip(loader.last_keys, labels.tolist(), images.cpu(), strict=True):
                read.append(hashlib.sha256(f"{key} {label} ".encode() + image.numpy().tobytes()).digest())
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        shares = [None] * ranks
        dist.all_gather_object(shares, read)
        # Rank r of W reads positions r, r + W, r + 2W, ... of the epoch. Past its end a rank may read a sample again.
        epoch_in_order = [sample for step in zip(*shares, strict=True) for sample in step][: len(train)]
        if rank == 0:
            digest = hashlib.sha256(b"".join(epoch_in_order)).hexdigest()
            print(f"epoch {epoch}: {len(epoch_in_order)} samples, digest {digest[:16]}")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
