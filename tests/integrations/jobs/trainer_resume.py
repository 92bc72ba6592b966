"""Lightning Trainer on two ranks, stopped at any step and resumed from its checkpoint: the batches and parameters."""

import os
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from noted import Noted, rows

from headrace import DataLoader
from launch import report

read: list[tuple[int, Any]] = []


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, step: int) -> torch.Tensor:
        read.append((self.current_epoch, rows([batch])))
        return self.layer(batch["noise"].float()[:, None]).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Stop(Callback):
    """Saves after a step, and stops there."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt  # which Lightning takes for a reason to end gracefully


def fit(checkpoint: str | None = None, *callbacks: Callback) -> tuple[list[Any], list[Any]]:
    read.clear()
    model = Model()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=list(callbacks),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(Noted(23), batch_size=2, shuffle=True, num_workers=1, executor="thread", seed=5)
    try:
        trainer.fit(model, loader, ckpt_path=checkpoint)
    except SystemExit:
        assert callbacks
    assert trainer.train_dataloader is loader
    assert loader.dataset.made_by_threads()
    return list(read), [parameter.tolist() for parameter in model.parameters()]


whole, parameters = fit()
outcomes = []
for stop in (1, 4, 6, 7, 12, 17):  # an epoch has 6 steps
    file = f"{sys.argv[1]}/{stop}.ckpt"
    before, _ = fit(None, Stop(stop, file))
    after, reached = fit(file)
    outcomes.append((len(before) == stop, before + after == whole, reached == parameters))
report(sys.argv[1], int(os.environ["RANK"]), outcomes)
