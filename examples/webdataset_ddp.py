"""A WebDataset pipeline that moves to headrace in two steps, and what each step gains.

torchrun --nproc-per-node=2 examples/webdataset_ddp.py FOLDER    or with python alone. FOLDER gets shards if it is new.
"""

import os
import sys
from collections import Counter
from itertools import islice

import torch
import torch.distributed as dist
import webdataset as wds
from sklearn.datasets import load_digits

import headrace

SAMPLES, BATCH, WORKERS = 296, 16, 2


def noisy(sample):
    key, image, label = sample
    return key, torch.from_numpy(image) + torch.randn(64), label


def pipeline(urls):  # each worker of each rank reads whole shards, in the same order in every epoch
    shards = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=100, seed=0)
    return shards.shuffle(100, seed=0).decode().to_tuple("__key__", "npy", "cls").map(noisy).batched(BATCH)


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def bits(batches):
    return [sample for keys, images, _ in batches for sample in zip(keys, images.tolist(), strict=True)]


def show(name, make):
    batches, stopped, fresh, resumed = list(make()), make(), make(), "no state"
    samples = bits(batches)
    if hasattr(stopped, "state_dict"):
        before = bits(islice(stopped, 5))
        fresh.load_state_dict(stopped.state_dict())
        resumed = all(gathered(before + bits(fresh) == samples))
    shares, steps = gathered([key for key, _ in samples]), gathered(len(batches))
    times = Counter(key for share in shares for key in share)
    counts = [len(share) for share in shares], steps, sum(count > 1 for count in times.values()), SAMPLES - len(times)
    if dist.get_rank() == 0:
        print("{}: samples {}, steps {}, twice {}, missing {}, resumed exactly: {}".format(name, *counts, resumed))


def main(folder):
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    if dist.get_rank() == 0 and not os.path.exists(folder):
        os.makedirs(folder)
        images, labels = (part[:SAMPLES] for part in load_digits(return_X_y=True))
        with wds.ShardWriter(f"{folder}/digits-%d.tar", maxcount=48, verbose=0) as writer:
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                writer.write({"__key__": f"{number:03}", "npy": image, "cls": int(label)})
    dist.barrier()
    urls = f"{folder}/digits-{{0..6}}.tar"
    options = {"num_workers": WORKERS, "batch_size": None}
    # Ranks have unequal steps, and under DDP one waits for ever. with_epoch: as many batches from each worker.
    show("0, WebLoader", lambda: wds.WebLoader(pipeline(urls), **options))
    each = -(-SAMPLES // (BATCH * WORKERS * dist.get_world_size()))
    show("0, with_epoch", lambda: wds.WebLoader(pipeline(urls).with_epoch(each), **options))
    # The same samples, now with a state: to resume, the pipeline is read again up to the place. seed= is for `noisy`.
    show("1, DataLoader", lambda: headrace.DataLoader(pipeline(urls).with_epoch(each), seed=0, **options))
    # With an index each sample comes once, in another order in each epoch; to resume, nothing is read again.
    dataset = headrace.TarDataset(urls, "__key__ npy cls", decode={}, transform=noisy)
    show("2, TarDataset", lambda: headrace.DataLoader(dataset, BATCH, shuffle=True, seed=0, num_workers=WORKERS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
