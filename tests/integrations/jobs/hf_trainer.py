"""Hugging Face's Trainer with our loaders: trained and evaluated; killed after a checkpoint; resumed in two ways."""

import multiprocessing
import os
import signal
import sys
from typing import Any

import torch
from noted import Noted, rows
from transformers import Trainer, TrainerCallback, TrainingArguments

from headrace import DataLoader
from launch import report

folder, first_port = sys.argv[1:]

SAVE_STEPS = 8
"""The steps before the checkpoint. An epoch has six."""


class Model(torch.nn.Module):
    """Notes the rows that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.read: list[Any] = []

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.read += rows([batch])
        return {"loss": self.layer(batch["noise"].float()[:, None]).square().mean(), "logits": batch["index"]}


class OwnTrainer(Trainer):
    """Makes loaders of ours."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            num_workers=2,
            executor="thread",
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        loader = DataLoader(
            test_dataset, self.args.per_device_eval_batch_size, num_workers=1, executor="thread", distributed=True
        )
        return self.accelerator.prepare(loader)


class KeepLoader(TrainerCallback):
    """Saves the loader's state beside each checkpoint, and loads it again."""

    def path(self, args: Any, state: Any) -> str:
        return f"{args.output_dir}/checkpoint-{state.global_step}/loader.pt"

    def on_save(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if args.should_save:
            torch.save(train_dataloader.state_dict(), self.path(args, state))

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if state.global_step:
            train_dataloader.load_state_dict(torch.load(self.path(args, state), weights_only=True))


class Kill(TrainerCallback):
    """Kills this process when it has trained on one batch more than the checkpoint knows of."""

    def __init__(self) -> None:
        self.saved = False

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved = True

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.saved:
            torch.distributed.barrier()  # the other rank has saved, too
            os.kill(os.getpid(), signal.SIGKILL)


class Watch(TrainerCallback):
    """Notes the loader that is trained from, and where each epoch's rows begin."""

    def __init__(self, model: Model) -> None:
        self.model, self.starts, self.loader = model, [], None

    def on_epoch_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self.starts.append(len(self.model.read))
        self.loader = train_dataloader


def train(checkpoint: str | None = None, *callbacks: TrainerCallback, **options: Any) -> dict[str, Any]:
    options = {"save_strategy": "no", "num_train_epochs": 3, "gradient_accumulation_steps": 1} | options
    args = TrainingArguments(
        output_dir=f"{folder}/kept", use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=3,
        learning_rate=0.1, label_names=["noise"], report_to="none", disable_tqdm=True,
        ddp_find_unused_parameters=False, remove_unused_columns=False, **options,
    )  # fmt: skip
    model = Model()
    watch = Watch(model)
    train_set, test_set = Noted(23), Noted(13)
    trainer = OwnTrainer(model, args, train_dataset=train_set, callbacks=[watch, *callbacks])
    trainer.train(resume_from_checkpoint=checkpoint)
    ends = [*watch.starts[1:], len(model.read)]
    return {
        "epochs": [model.read[start:end] for start, end in zip(watch.starts, ends, strict=True)],
        "ours": type(watch.loader) is DataLoader,
        "made by threads": train_set.made_by_threads(),
        "steps": trainer.state.global_step,
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "predicted": [] if checkpoint else trainer.predict(test_set).predictions.tolist(),
        "predicted by threads": checkpoint is not None or test_set.made_by_threads(),
    }


def first_run(rank: int) -> None:
    """Be a run that has nothing to resume from: what it reads is noted, then it is done again and killed."""
    os.environ["MASTER_PORT"] = first_port
    report(f"{folder}/first", rank, {"whole": train(), "accumulated": train(gradient_accumulation_steps=2)})
    train(None, KeepLoader(), Kill(), save_strategy="steps", save_steps=SAVE_STEPS)


def main() -> None:
    rank = int(os.environ["RANK"])
    os.makedirs(f"{folder}/first", exist_ok=True)
    first = multiprocessing.get_context("fork").Process(target=first_run, args=(rank,))  # to import all that once
    first.start()
    first.join()
    checkpoint = f"{folder}/kept/checkpoint-{SAVE_STEPS}"
    found = {
        "killed": first.exitcode == -signal.SIGKILL,
        "resumed": train(checkpoint, KeepLoader(), ignore_data_skip=True),
        "skipped": train(checkpoint),
    }
    report(folder, rank, found)


main()
