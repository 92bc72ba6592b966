"""Draws the pictures of docs/orders.md: python docs/pictures/draw.py [FOLDER]. Needs the extra `plot`."""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

from headrace import (
    Balanced,
    Blocks,
    LengthBucketed,
    Order,
    Plan,
    Sequential,
    Shuffled,
    Subset,
    Weighted,
    World,
)
from headrace.plan.endless import Endless

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SAMPLES, RANKS, BATCH_SIZE = 48, 4, 3
COLOURS = ["#4269d0", "#efb118", "#ff725c", "#3ca951"]
LABELS = np.repeat([0, 1, 2], [30, 12, 6])
WEIGHTS = np.linspace(0.2, 3, SAMPLES)
LENGTHS = np.random.default_rng(3).permutation(np.geomspace(8, 90, SAMPLES).astype(int))
SIZES = [8] * 6

ORDERS: dict[str, tuple[Order, str, NDArray[Any]]] = {
    "sequential": (Sequential(), "index", np.arange(SAMPLES)),
    "shuffled": (Shuffled(), "index", np.arange(SAMPLES)),
    "subset": (Subset(range(12, 36), shuffle=True), "index", np.arange(SAMPLES)),
    "weighted": (Weighted(WEIGHTS), "index (heavier upwards)", np.arange(SAMPLES)),
    "weighted_once": (Weighted(WEIGHTS, replacement=False), "index (heavier upwards)", np.arange(SAMPLES)),
    "balanced": (Balanced(LABELS), "index, in three classes", np.arange(SAMPLES)),
    "blocks": (Blocks(SIZES, streams=4, window=6), "index, in six blocks", np.arange(SAMPLES)),
    "bucketed": (LengthBucketed(LENGTHS, max_tokens=180, cells=4, spread=0.3), "length", LENGTHS),
    "epoch_samples": (Endless(Shuffled(), 36), "index", np.arange(SAMPLES)),
}
"""Each picture's order, what its vertical axis shows, and that value of each sample, shape (SAMPLES,)."""


def draw(name: str, folder: Path) -> Path:
    """Draw two epochs of an order: which sample stands at each position, and which rank reads it at which step."""
    order, vertical, values = ORDERS[name]
    batch_size = order.per_rank or BATCH_SIZE
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
    for epoch, axis in enumerate(axes):
        for rank in range(RANKS):
            plan = Plan(order, SAMPLES, batch_size, World(rank, RANKS), seed=1)
            positions = np.concatenate([plan.positions(epoch, step) for step in range(plan.steps(epoch))])
            drawn = values[plan.indices(epoch, positions)]
            axis.scatter(positions, drawn, s=16, color=COLOURS[rank], label=f"rank {rank}" if epoch else None)
        for step in range(plan.steps(epoch)):
            axis.axvline(plan.cursor_after(epoch, step) - 0.5, color="#bbbbbb", linewidth=0.7, zorder=0)
        for line in {"blocks": np.cumsum(SIZES)[:-1], "balanced": [30, 42]}.get(name, ()):
            axis.axhline(line - 0.5, color="#dddddd", linewidth=0.7, zorder=0)
        axis.set(title=f"epoch {epoch}", xlabel="position in the epoch", xlim=(-1, plan.samples))
    axes[0].set_ylabel(vertical)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for one in ORDERS:
        print(draw(one, target))
