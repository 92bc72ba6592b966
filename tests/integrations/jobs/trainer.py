"""Lightning Trainer: fit, validate and predict; its own sampler injection left on, no set_epoch."""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from noted import Noted, Told

from headrace import DataLoader
from launch import report

trained: list[list[int]] = []
validated: list[int] = []


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def on_train_epoch_start(self) -> None:
        trained.append([])

    def training_step(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        trained[-1] += batch.tolist()
        return self.layer(batch.float()[:, None]).sum()

    def validation_step(self, batch: Any, step: int) -> None:
        validated.extend(batch["index"].tolist())

    def predict_step(self, batch: Any, step: int) -> Any:
        return batch["index"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


loader = DataLoader(Told(23), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
held_out = DataLoader(Noted(13), batch_size=2, tail="exact", num_workers=1, executor="thread")
predicted = DataLoader(Noted(14), batch_size=2, num_workers=1, executor="thread")
trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, num_sanity_val_steps=0, limit_val_batches=1.0,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Model(), loader)
same = trainer.train_dataloader is loader
trainer.validate(Model(), held_out, verbose=False)
predictions = trainer.predict(Model(), predicted)  # Lightning makes another loader of it
report(
    sys.argv[1],
    trainer.global_rank,
    {
        "epochs": [[sample % 100 for sample in epoch] for epoch in trained],
        "told": [sorted({sample // 100 for sample in epoch}) for epoch in trained],
        "ours": same,
        "validated": validated,
        "predicted": [index for batch in predictions or [] for index in batch.tolist()],
        "made by threads": held_out.dataset.made_by_threads() and predicted.dataset.made_by_threads(),
        "workers_left": loader._iterator is not None,
    },
)
