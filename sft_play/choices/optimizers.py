"""The optimizers: one row each, from which the setting, its refusals and the sizes of states follow.

What makes an optimizer or its states imports torch when it is called.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from sft_play.errors import ConfigError
from sft_play.extras import install_command

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

    State = Mapping[str, Tensor | int]  # of one parameter, by name

EIGHT_BIT_BLOCK = 256  # bitsandbytes: values of an 8-bit optimizer state that share a scale
EIGHT_BIT_FROM = 4096  # bitsandbytes: smaller tensors have 32-bit states
PAGED_FROM = 100_000  # bitsandbytes: states of smaller tensors are not paged

# How an engine divides what is trained: all joined to one vector, or each tensor for itself.
Divided = Literal["joined", "cut"]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A value of `train.optimizer`."""

    name: str
    code: str  # module and class, as transformers takes it
    settings: dict[str, Any] = field(default_factory=dict)  # of the class; nothing is paged
    state: Callable[["Optimizer", "Tensor", bool, bool], "State"]  # as in `optimizer_state`
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

    def least_bytes(self, element_bytes: int) -> int:
        """At least so many bytes of states on the device for a trained element of so many bytes."""
        return 0 if self.unpaged else self.moments * min(element_bytes, self.bits // 8)


def _adamw_state(row: Optimizer, tensor: "Tensor", on_gpu: bool, embedding: bool) -> "State":
    """Two moments of the same shape, and a scalar for the step."""
    import torch

    moments = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}


def _adafactor_state(row: Optimizer, tensor: "Tensor", on_gpu: bool, embedding: bool) -> "State":
    """Of [..., rows, columns], means over columns, [..., rows], and over rows, [..., columns].

    In fp32 for a 16-bit parameter too, since the gradient is cast first.
    """
    import torch

    shape = tensor.shape
    sizes = {"exp_avg_sq": shape}
    if len(shape) >= 2:
        sizes = {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
    squares = {name: torch.zeros(size, dtype=torch.float32) for name, size in sizes.items()}
    return {"step": 1, **squares, "RMS": torch.zeros((), dtype=torch.float32)}


def _schedule_free_state(row: Optimizer, tensor: "Tensor", on_gpu: bool, embedding: bool) -> "State":
    """One moment, and its own weights, of the same shape."""
    import torch

    return {name: torch.zeros_like(tensor) for name in ("z", "exp_avg_sq")}


def _bitsandbytes_state(row: Optimizer, tensor: "Tensor", on_gpu: bool, embedding: bool) -> "State":
    """In 8 bits, moments are bytes with scales. Paged ones are none of the memory that a GPU must have.

    Those of an embedding have 32 bits, since transformers makes bitsandbytes keep them so.
    """
    import torch

    count = tensor.numel()
    paged = row.unpaged is not None and on_gpu and count >= PAGED_FROM
    eight_bit = row.bits == 8 and not embedding and count >= EIGHT_BIT_FROM
    dtype = torch.uint8 if eight_bit else torch.float32
    place = "meta" if paged else tensor.device  # on the meta device, nothing is allocated
    state: dict[str, Tensor | int] = {"step": 1}
    for number in range(1, row.moments + 1):
        state[f"state{number}"] = moment = torch.zeros(tensor.shape, dtype=dtype, device=place)
        moment.is_paged = paged  # type: ignore[attr-defined]  # bitsandbytes asks for it
        if eight_bit:
            state[f"qmap{number}"] = torch.empty(0)  # 1 KiB, the same for all parameters
            state[f"absmax{number}"] = torch.zeros(-(-count // EIGHT_BIT_BLOCK))
    return state


def _bitsandbytes(kind: str, bits: int = 32, **more: Any) -> Optimizer:
    return Optimizer(
        code=f"bitsandbytes.optim:{kind}",
        settings={"optim_bits": bits},
        state=_bitsandbytes_state,
        package="bitsandbytes",
        bits=bits,
        **more,
    )


_AdamW, _Lion = partial(_bitsandbytes, "AdamW"), partial(_bitsandbytes, "Lion", moments=1)
# The default first.
OPTIMIZERS = {
    row.name: row
    for row in (
        Optimizer(
            name="adamw",
            code="torch.optim:AdamW",
            settings={"fused": True},
            state=_adamw_state,
            says="adamw: AdamW (fused if the device supports it).",
            of_trainer="adamw_torch_fused",
            lighter="adamw_8bit",
            divided=("joined", "cut"),
        ),
        _AdamW(
            name="adamw_8bit",
            says="Names ending in _8bit or _32bit are from bitsandbytes; paged_ ones move their states to "
            "RAM when the GPU is full.",
            bits=8,
            divided=("joined",),
        ),
        _AdamW(name="paged_adamw_32bit", unpaged="adamw"),
        _AdamW(name="paged_adamw_8bit", bits=8, unpaged="adamw_8bit"),
        Optimizer(
            name="adafactor",
            code="transformers.optimization:Adafactor",
            settings={"scale_parameter": False, "relative_step": False},
            state=_adafactor_state,
            says="adafactor: stores a row and a column per matrix instead of two full states.",
            moments=0,
        ),
        _Lion(
            name="lion_32bit",
            says="lion: one state instead of two; needs a lower learning rate.",
        ),
        _Lion(name="lion_8bit", bits=8),
        _Lion(name="paged_lion_32bit", unpaged="lion_32bit"),
        _Lion(name="paged_lion_8bit", bits=8, unpaged="lion_8bit"),
        Optimizer(
            name="schedule_free_adamw",
            code="schedulefree:AdamWScheduleFree",
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
    module, _, kind = row.code.partition(":")
    try:
        make: Any = getattr(import_module(module), kind)
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer={name} needs a package that cannot be imported: {error}\n"
            f"Run `{install_command(row.package or '')}`"
        ) from error
    optimizer = make(parameters, lr=1e-4, **row.settings)
    if row.averages:
        optimizer.train()
    return optimizer


def optimizer_state(name: str, tensor: "Tensor", device: str, *, embedding: bool = False) -> "State":
    """The optimizer's state for a parameter of any shape, on any device, in a run on "cuda" or "cpu"."""
    row = OPTIMIZERS[name]
    return row.state(row, tensor, device == "cuda", embedding)


def state_bytes(name: str, device: str, elements: int) -> int:
    """Bytes of the optimizer's states for so many elements in one fp32 vector, without its count of steps."""
    import torch

    vector = torch.empty(elements, dtype=torch.float32, device="meta")
    with torch.device("meta"):
        state = optimizer_state(name, vector, device)
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
