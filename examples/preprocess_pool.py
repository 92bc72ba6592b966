"""Preprocessing by a Pool of torch.multiprocessing, and by the loader: python examples/preprocess_pool.py."""

import signal

import numpy as np
import torch
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, default_collate

from headrace import DataLoader

SIZE, COUNT, FORK = 8, 8, mp.get_context("fork")  # batches of 8, and 8 of them
KILLS, GO_ON = FORK.Semaphore(0), FORK.Event()  # what may happen at any time happens at the same place in every run


class Pictures(TensorDataset):
    """Enlarged and normalised digits, each with a random number, as augmentation draws it, and its batch's number."""

    def __getitem__(self, index):
        if index == 0:
            GO_ON.wait(60)  # a slow sample: another worker makes batches 1 to 3 meanwhile
        if index == 4 * SIZE - 1:
            GO_ON.set()
        if index == SIZE and KILLS.acquire(block=False):
            signal.raise_signal(signal.SIGKILL)  # as the system does when memory runs out
        image = torch.nn.functional.interpolate(self.tensors[0][index : index + 1], size=32, mode="bilinear")[0]
        return (image - image.mean()) / image.std(), np.random.random(), index // SIZE


PICTURES = Pictures(torch.tensor(load_digits().images[: SIZE * COUNT], dtype=torch.float32)[:, None])


def make(batch):
    return default_collate([PICTURES[index] for index in range(batch * SIZE, (batch + 1) * SIZE)])


def by_hand(workers, first=0, limit_s=60):
    np.random.seed(0)
    GO_ON.clear() if workers > 1 else GO_ON.set()
    with FORK.Pool(workers) as pool:
        coming = pool.imap_unordered(make, range(first, COUNT))
        made = [coming.next(60) for _ in range(first + 1, COUNT)]
        try:
            return [*made, coming.next(limit_s)]
        except mp.TimeoutError:  # the lost batch: without a limit this waits for ever
            return made


def by_loader(workers):
    GO_ON.clear() if workers > 1 else GO_ON.set()
    return DataLoader(PICTURES, SIZE, num_workers=workers, seed=0, multiprocessing_context=FORK if workers else None)


def same(part, *runs):  # 0: the pictures; 1: the random numbers
    one, *rest = (torch.cat([batch[part] for batch in sorted(run, key=lambda batch: batch[2][0])]) for run in runs)
    return all(torch.equal(one, other) for other in rest)


def main():
    hand, loader = [by_hand(1), by_hand(2)], [list(by_loader(workers)) for workers in (1, 2, 0)]
    print("pictures by hand and by the loader are the same bits:", same(0, *hand, *loader))
    stopped, resumed = by_loader(1), by_loader(1)
    before = [batch for _, batch in zip(range(4), stopped, strict=False)]
    resumed.load_state_dict(stopped.state_dict())
    KILLS.release()
    hand += hand[0][:4] + by_hand(1, first=4), by_hand(2, limit_s=3)
    KILLS.release()
    loader[2:] = before + list(resumed), list(by_loader(1))
    for name, (one, two, again, killed) in ("by hand", hand), ("by the loader", loader):
        numbers = torch.cat([batch[1] for batch in two])
        print(f"{name}: the first batch that comes is {two[0][2][0]}")
        print(f"{name}: no two samples have the same random number: {len(numbers.unique()) == len(numbers)}")
        print(f"{name}: random numbers with one worker and with two are the same: {same(1, one, two)}")
        print(f"{name}: random numbers of a resumed run are the same: {same(1, one, again)}")
        print(f"{name}: a worker is killed: {len(killed)} of {COUNT} batches, the same: {same(1, one, killed)}")


if __name__ == "__main__":
    main()
