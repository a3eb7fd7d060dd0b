"""The optimizers, as transformers makes them, and the states that they keep for a parameter."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sft_play.config.methods import PAGED, SCHEDULE_FREE
from sft_play.errors import ConfigError
from sft_play.extras import install_command
from sft_play.sizing.step import StepSpec

EIGHT_BIT_BLOCK = 256  # bitsandbytes: values of an 8-bit optimizer state that share a scale
EIGHT_BIT_FROM = 4096  # bitsandbytes: smaller tensors have 32-bit states
PAGED_FROM = 100_000  # bitsandbytes: states of smaller tensors are not paged


def make_optimizer(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that train.optimizer=`name` gives the trainer, over these parameters; never paged.

    Raises:
        ConfigError: its package is not installed.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)
    if name == SCHEDULE_FREE:
        return _schedule_free(parameters)
    from bitsandbytes.optim import AdamW, Lion

    kind: Any = Lion if "lion" in name else AdamW
    return kind(parameters, lr=1e-4, optim_bits=8 if name.endswith("8bit") else 32)


def _schedule_free(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer={SCHEDULE_FREE} needs a package that cannot be imported: {error}\n"
            f"Run `{install_command('schedulefree')}`"
        ) from error
    optimizer = AdamWScheduleFree(parameters, lr=1e-4)
    optimizer.train()
    return optimizer


def optimizer_state(parameter: Tensor, spec: StepSpec, *, embedding: bool) -> dict[str, Any]:
    """The optimizer's state for a parameter of any shape, as after a step.

    AdamW has two moments of the parameter's shape, Lion one, and schedule-free AdamW one and its own weights.
    In 8 bits, moments are bytes with scales; for embeddings, transformers makes bitsandbytes keep 32 bits.
    Adafactor has a row and a column for the last two dimensions of a parameter. Paged states are none of the
    memory that a GPU must have.
    """
    if spec.optimizer == "adamw":
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32), **moments}
    if spec.optimizer == SCHEDULE_FREE:
        return {name: torch.zeros_like(parameter) for name in ("z", "exp_avg_sq")}
    if spec.optimizer == "adafactor":
        return _adafactor_state(parameter)
    return _bitsandbytes_state(parameter, spec, embedding=embedding)


def state_bytes(spec: StepSpec, elements: int) -> int:
    """Bytes of the optimizer's states for so many elements in one fp32 vector, without its count of steps."""
    vector = torch.empty(elements, dtype=torch.float32, device="meta")
    with torch.device("meta"):
        state = optimizer_state(vector, spec, embedding=False)
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _adafactor_state(parameter: Tensor) -> dict[str, Any]:
    """In fp32 for a 16-bit parameter too, since the gradient is cast first."""
    shape = parameter.shape
    sizes = {"exp_avg_sq": shape}
    if len(shape) >= 2:
        sizes = {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
    squares = {name: torch.zeros(size, dtype=torch.float32) for name, size in sizes.items()}
    return {"step": 1, **squares, "RMS": torch.zeros((), dtype=torch.float32)}


def _bitsandbytes_state(parameter: Tensor, spec: StepSpec, *, embedding: bool) -> dict[str, Any]:
    count, numbers = parameter.numel(), ("1",) if "lion" in spec.optimizer else ("1", "2")
    paged = spec.optimizer.startswith(PAGED) and spec.device == "cuda" and count >= PAGED_FROM
    eight_bit = spec.optimizer.endswith("8bit") and not embedding and count >= EIGHT_BIT_FROM
    dtype = torch.uint8 if eight_bit else torch.float32
    state: dict[str, Any] = {"step": 1}
    for number in numbers:
        place = "meta" if paged else parameter.device  # on the meta device, nothing is allocated
        state[f"state{number}"] = moment = torch.zeros(parameter.shape, dtype=dtype, device=place)
        moment.is_paged = paged  # type: ignore[attr-defined]  # bitsandbytes asks for it
        if eight_bit:
            state[f"qmap{number}"] = torch.empty(0)  # 1 KiB, the same for all parameters
            state[f"absmax{number}"] = torch.zeros(-(-count // EIGHT_BIT_BLOCK))
    return state
