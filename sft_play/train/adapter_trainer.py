"""What the library's trainer has no argument for.

LoRA+, noise that follows from the step, and optimizers whose result is an average.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from trl import SFTTrainer


class AdapterTrainer(SFTTrainer):
    """TRL's trainer with LoRA+ if `plus_ratio` is set."""

    plus_ratio: float | None = None  # learning rate of the B matrices / that of the A matrices

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(NoiseOfStep())

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments; for LoRA+, the B matrices are in groups of their own.

        PEFT's function for it gives their rate to vectors too, such as norms that are trained whole.
        """
        if self.plus_ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        named = (self.model if model is None else model).named_parameters()  # type: ignore[union-attr]
        b_matrices = {weight for name, weight in named if "lora_B" in name}
        for group in list(optimizer.param_groups):
            fast = [weight for weight in group["params"] if weight in b_matrices]
            group["params"] = [weight for weight in group["params"] if weight not in b_matrices]
            optimizer.add_param_group({**group, "params": fast, "lr": self.plus_ratio * group["lr"]})
        # DeepSpeed drops groups without parameters, after the schedule has got a rate for each
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.optimizer.train()  # type: ignore[union-attr]
        return prepared

    def _load_best_model(self) -> None:
        self.optimizer.eval()  # type: ignore[union-attr]  # what is loaded is an average already
        super()._load_best_model()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with averaged(self.optimizer):
            super()._save_checkpoint(model, trial)


class NoiseOfStep(TrainerCallback):
    """Tells the model which step its noise is for (model/noise.py)."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts as the trainer does, also in a resumed run."""
        kwargs["model"].noise_step = state.global_step


@contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """In the block, the weights are those that a schedule-free optimizer has found; others change nothing.

    Between its steps, they are the point where the next gradient is computed.

    Args:
        optimizer: as accelerate wrapped it; None before it exists.
    """
    if optimizer is None:
        yield
        return
    optimizer.eval()
    yield
    optimizer.train()


def rate_factors(schedule: Any) -> list[float]:
    """How many times the learning rate of the first group each group of parameters has."""
    first = schedule.base_lrs[0]
    return [base / first for base in schedule.base_lrs]
