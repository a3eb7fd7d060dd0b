"""The optimizers: one row each, from which the setting, its refusals and the sizes of states follow.

What makes an optimizer or its states imports torch when it is called.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sft_play.errors import ConfigError
from sft_play.extras import install_command

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

EIGHT_BIT_BLOCK = 256  # bitsandbytes: values of an 8-bit optimizer state that share a scale
EIGHT_BIT_FROM = 4096  # bitsandbytes: smaller tensors have 32-bit states
PAGED_FROM = 100_000  # bitsandbytes: states of smaller tensors are not paged

# How an engine divides what is trained: all joined to one vector, or each tensor for itself.
Divided = Literal["joined", "cut"]


@dataclass(frozen=True)
class Parameter:
    """What is trained, of any shape, and what matters to its optimizer states."""

    tensor: "Tensor"
    on_gpu: bool  # of the run, whatever the device of the tensor
    embedding: bool  # its states have 32 bits, since transformers makes bitsandbytes keep them so


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A value of `train.optimizer`."""

    name: str
    make: Callable[["Optimizer", Iterable["Tensor"]], "TorchOptimizer"]  # as transformers does, never paged
    state: Callable[["Optimizer", Parameter], dict[str, Any]]  # as after a step
    says: str = ""  # in the reference, unless an earlier row has said it
    of_trainer: str = ""  # what transformers calls it; the same by default
    package: str | None = None  # that it needs besides torch and transformers; also its extra, if it has one
    moments: int = 2  # values that it keeps for an element, and their bits
    bits: int = 32
    unpaged: str | None = None  # the same one with states that stay on the GPU, for one that pages them
    lighter: str | None = None  # the same one with smaller states
    divided: tuple[Divided, ...] = ()  # how its states may be
    averages: bool = False  # the weights, instead of lowering the learning rate

    @property
    def trainer(self) -> str:
        """What transformers calls it."""
        return self.of_trainer or self.name


def _adamw(row: Optimizer, parameters: Iterable["Tensor"]) -> "TorchOptimizer":
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _adamw_state(row: Optimizer, parameter: Parameter) -> dict[str, Any]:
    import torch

    moments = {name: torch.zeros_like(parameter.tensor) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}


def _adafactor(row: Optimizer, parameters: Iterable["Tensor"]) -> "TorchOptimizer":
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)


def _adafactor_state(row: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """A row and a column of the last two dimensions.

    In fp32 for a 16-bit parameter too, since the gradient is cast first.
    """
    import torch

    shape = parameter.tensor.shape
    sizes = {"exp_avg_sq": shape}
    if len(shape) >= 2:
        sizes = {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
    squares = {name: torch.zeros(size, dtype=torch.float32) for name, size in sizes.items()}
    return {"step": 1, **squares, "RMS": torch.zeros((), dtype=torch.float32)}


def _schedule_free(row: Optimizer, parameters: Iterable["Tensor"]) -> "TorchOptimizer":
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(parameters, lr=1e-4)
    optimizer.train()
    return optimizer


def _schedule_free_state(row: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """One moment, and its own weights."""
    import torch

    return {name: torch.zeros_like(parameter.tensor) for name in ("z", "exp_avg_sq")}


def _bitsandbytes(row: Optimizer, parameters: Iterable["Tensor"]) -> "TorchOptimizer":
    from bitsandbytes.optim import AdamW, Lion

    kind: Any = AdamW if row.moments == 2 else Lion
    return kind(parameters, lr=1e-4, optim_bits=row.bits)


def _bitsandbytes_state(row: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """In 8 bits, moments are bytes with scales. Paged ones are none of the memory that a GPU must have."""
    import torch

    count = parameter.tensor.numel()
    paged = row.unpaged is not None and parameter.on_gpu and count >= PAGED_FROM
    eight_bit = row.bits == 8 and not parameter.embedding and count >= EIGHT_BIT_FROM
    dtype = torch.uint8 if eight_bit else torch.float32
    place = "meta" if paged else parameter.tensor.device  # on the meta device, nothing is allocated
    state: dict[str, Any] = {"step": 1}
    for number in range(1, row.moments + 1):
        state[f"state{number}"] = moment = torch.zeros(parameter.tensor.shape, dtype=dtype, device=place)
        moment.is_paged = paged  # type: ignore[attr-defined]  # bitsandbytes asks for it
        if eight_bit:
            state[f"qmap{number}"] = torch.empty(0)  # 1 KiB, the same for all parameters
            state[f"absmax{number}"] = torch.zeros(-(-count // EIGHT_BIT_BLOCK))
    return state


_OfBitsandbytes = partial(Optimizer, make=_bitsandbytes, state=_bitsandbytes_state, package="bitsandbytes")
# The default first.
OPTIMIZERS = {
    row.name: row
    for row in (
        Optimizer(
            name="adamw",
            make=_adamw,
            state=_adamw_state,
            says="adamw: AdamW (fused if the device supports it).",
            of_trainer="adamw_torch_fused",
            lighter="adamw_8bit",
            divided=("joined", "cut"),
        ),
        _OfBitsandbytes(
            name="adamw_8bit",
            says="Those with _8bit or _32bit are from bitsandbytes; a paged_ one moves its states to RAM "
            "while the GPU is full.",
            bits=8,
            divided=("joined",),
        ),
        _OfBitsandbytes(name="paged_adamw_32bit", unpaged="adamw"),
        _OfBitsandbytes(name="paged_adamw_8bit", bits=8, unpaged="adamw_8bit"),
        Optimizer(
            name="adafactor",
            make=_adafactor,
            state=_adafactor_state,
            says="adafactor: for each matrix, a row and a column instead of two states.",
        ),
        _OfBitsandbytes(
            name="lion_32bit",
            says="lion: one state instead of two; needs a lower learning rate.",
            moments=1,
        ),
        _OfBitsandbytes(name="lion_8bit", moments=1, bits=8),
        _OfBitsandbytes(name="paged_lion_32bit", moments=1, unpaged="lion_32bit"),
        _OfBitsandbytes(name="paged_lion_8bit", moments=1, bits=8, unpaged="lion_8bit"),
        Optimizer(
            name="schedule_free_adamw",
            make=_schedule_free,
            state=_schedule_free_state,
            says="schedule_free_adamw (arXiv 2405.15682): averages the weights instead of lowering the rate.",
            package="schedulefree",
            averages=True,
        ),
    )
}
DEFAULT = next(iter(OPTIMIZERS))


def make_optimizer(name: str, parameters: Iterable["Tensor"]) -> "TorchOptimizer":
    """The optimizer that train.optimizer=`name` gives the trainer, over these parameters; never paged.

    Raises:
        ConfigError: its package cannot be imported.
    """
    row = OPTIMIZERS[name]
    try:
        return row.make(row, parameters)
    except ImportError as error:
        if row.package is None:
            raise
        raise ConfigError(
            f"train.optimizer={name} needs a package that cannot be imported: {error}\n"
            f"Run `{install_command(row.package)}`"
        ) from error


def optimizer_state(name: str, tensor: "Tensor", device: str, *, embedding: bool = False) -> dict[str, Any]:
    """The optimizer's state for a parameter of any shape, as after a step.

    Args:
        name: of the optimizer.
        tensor: the parameter, on any device.
        device: "cuda" or "cpu", of the run.
        embedding: whether it is an embedding.
    """
    row = OPTIMIZERS[name]
    return row.state(row, Parameter(tensor, device == "cuda", embedding))


def state_bytes(name: str, device: str, elements: int) -> int:
    """Bytes of the optimizer's states for so many elements in one fp32 vector, without its count of steps."""
    import torch

    vector = torch.empty(elements, dtype=torch.float32, device="meta")
    with torch.device("meta"):
        state = optimizer_state(name, vector, device)
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
