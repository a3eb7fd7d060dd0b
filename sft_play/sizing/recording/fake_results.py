"""A `FakeTensorMode` that finds out the result of an operation once.

PyTorch's own cache of fake results costs more than most operations: its keys hold twenty properties of each
tensor. A trace has dense tensors of one process only, so few properties tell calls apart. Whatever is out of
the ordinary (another class of tensor, an argument that cannot be compared, a result that aliases in another
way) is left to PyTorch. What is kept has shapes, strides and types, no tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # shape, stride, type and device
Maker = Callable[["KeepingFakeMode", Any, Sequence[Any], Mapping[str, Any]], Any]  # mode, operation, operands

COMPARED = frozenset([
    int, float, bool, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
])  # fmt: skip
# They change what a tensor is, or depend on more than their arguments.
NOT_KEPT = frozenset(["lift", "lift_fresh", "lift_fresh_copy", "resize_", "resize_as_", "set_", "set_data"])
ODD = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view])
MOST_CALLS = 100_000  # that are known at a time; a trace has one or two thousand of its own

_META = torch.device("meta")
_LEFT = object()  # the result of a call that is left to PyTorch
without_function_modes = torch._C.DisableTorchFunction


class KeepingFakeMode(FakeTensorMode):
    """As its base class, faster for operations that have been called with such arguments before."""

    known: dict[Any, Maker | None] = {}  # by call, for all modes; None if PyTorch has to be asked each time

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._asks_pytorch = False  # in the next call of the handler
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a fake tensor on a device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leaves the handler unwrapped: nothing is compiled here, and each call of a wrapper takes time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of an operation."""
        kwargs = kwargs or {}
        if self._asks_pytorch:
            self._asks_pytorch = False
            return super().__torch_dispatch__(func, types, args, kwargs)
        found, key = self.found(func, args, kwargs)
        if found is _LEFT:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            self._keep(key, func, args, kwargs, found)
        return found

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The same within the handler of another mode, without a way through PyTorch's dispatcher."""
        with without_function_modes():
            found, key = self.found(func, args, kwargs)
        if found is _LEFT:
            self._asks_pytorch = True
            found = func(*args, **kwargs)
            self._keep(key, func, args, kwargs, found)
        return found

    def found(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """The result if it is known; else a mark, with the key to keep it by or None."""
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not (self._described(args, parts) and self._described((*kwargs, *kwargs.values()), parts)):
            return _LEFT, None
        key = tuple(parts)
        make = self.known.get(key, _LEFT)
        if make is _LEFT:
            return _LEFT, key
        return (_LEFT if make is None else make(self, func, args, kwargs)), None  # type: ignore[operator]

    def _described(self, values: Any, parts: list[Any]) -> bool:
        """Appends all that a result may depend on; whether that is possible."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                parts += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            elif kind in COMPARED:
                parts += (kind, value)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._described(value, parts):
                    return False
            else:
                return False
        return True

    def _keep(self, key: object, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if key is None:
            return
        if len(self.known) >= MOST_CALLS:
            self.known.clear()
        self.known[key] = _maker_of(func, args, kwargs, out)

    def wrapped(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor of any shape, as `FakeTensor.__new__` makes it, which examines each argument."""
        if device not in self._attributes:
            self._attributes[device] = vars(FakeTensor(self, meta, device))
        fake: Any = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes[device])
        return fake  # type: ignore[no-any-return]


def _maker_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Maker | None:
    """How such a result is made again; None if PyTorch has to be asked."""
    if ODD.intersection(func.tags) or func._schema.name.partition("::")[2] in NOT_KEPT:
        return None
    if out is None:
        return _nothing
    outs = out if isinstance(out, (list, tuple)) else (out,)
    if not outs or not all(type(each) is FakeTensor and each.constant is None for each in outs):
        return None
    if any(out is each for each in kwargs.values()):
        return None
    for place, value in enumerate(args):
        if out is value:
            return partial(_argument, place)
    given = list(_tensors((args, tuple(kwargs.values()))))
    storages = {each.untyped_storage()._cdata for each in given}
    own = [each.untyped_storage()._cdata for each in outs]
    if storages.issuperset(own):
        one_device = len({each.fake_device for each in given}) == 1
        return _view if one_device and not func._schema.is_mutable else None
    if not storages.isdisjoint(own) or len(set(own)) < len(own) or not all(map(_is_plain, outs)):
        return None
    layouts = [(each.shape, each.stride(), each.dtype, each.fake_device) for each in outs]
    if isinstance(out, torch.Tensor):
        return partial(_new, layouts[0])
    return partial(_several_new, layouts) if type(out) is tuple else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any shape fills its storage from the start, and stands for no other one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return (
        tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == elements * tensor.dtype.itemsize
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _nothing(mode: KeepingFakeMode, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Of an operation in place on lists of tensors."""


def _argument(
    place: int, mode: KeepingFakeMode, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return args[place]


def _new(
    layout: Layout, mode: KeepingFakeMode, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> FakeTensor:
    shape, stride, dtype, device = layout
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        return mode.wrapped(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)


def _several_new(layouts: Sequence[Layout], *call: Any) -> tuple[FakeTensor, ...]:
    return tuple(_new(layout, *call) for layout in layouts)


def _view(mode: KeepingFakeMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view, or several, that PyTorch's kernel makes of the meta tensor within the fake one."""
    device = next(_tensors(args)).fake_device
    mode.in_kernel_invocation = True
    try:
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                return mode.wrapped(out, device)
            return type(out)(mode.wrapped(each, device) for each in out)
    finally:
        mode.in_kernel_invocation = False
