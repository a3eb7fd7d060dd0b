"""A `FakeTensorMode` that finds out the result of an operation once.

PyTorch's own cache of fake results costs more than most operations: its keys hold twenty properties of each
tensor. A trace has dense tensors of one process only, so few properties tell calls apart. Whatever is out of
the ordinary (another class of tensor, an argument that cannot be compared, a result that aliases in another
way) is left to PyTorch. What is kept has shapes, strides and types, no tensors.

Where PyTorch would only ask the operation's kernel for meta tensors, that is asked at once: for each view,
and the first time for others. PyTorch's way to it takes several times as long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sft_play.upstream.torch import fake_by, schema_of

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

_CPU, _META = torch.device("cpu"), torch.device("meta")
_LEFT = object()  # the result of a call that is left to PyTorch


class KeepingFakeMode(FakeTensorMode):
    """As its base class, faster for operations that have been called with such arguments before."""

    # by call, for all modes, with a place for notes; None if PyTorch has to be asked each time
    known: dict[Any, tuple[Maker, list[Any]] | None] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.notes: list[Any] | None = None  # what callers keep of the last call, if its result was known
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
        found, key = self.found(func, args, kwargs)
        if found is _LEFT:
            self._asks_pytorch = True
            found = func(*args, **kwargs)
            self._keep(key, func, args, kwargs, found)
            self.notes = None  # it may have called others
        return found

    def found(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """The result if it is known or a kernel has it; else a mark, with the key to keep it by or None."""
        way, self.notes = fake_by(func), None
        if way == "view" and type(args[0]) is FakeTensor and self._is_own(args[0]):
            return _view(self, func, args, kwargs), None
        if way == "collective":
            return _by_kernel(self, func, args, kwargs, _CPU), None
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not (self._described(args, parts) and self._described((*kwargs, *kwargs.values()), parts)):
            return _LEFT, None
        key = tuple(parts)
        known = self.known.get(key, ())
        if known is None:
            return _LEFT, None
        if known:
            make, self.notes = known
            return make(self, func, args, kwargs), None
        devices = {each.fake_device for each in _tensors((args, tuple(kwargs.values())))}
        if way == "constructor":
            devices = {kwargs.get("device") or next(iter(devices), _CPU)}
        elif way != "kernel" or len(devices) != 1:
            return _LEFT, key
        on_meta = {**kwargs, "device": _META} if way == "constructor" else kwargs
        out = _by_kernel(self, func, args, on_meta, devices.pop())
        self._keep(key, func, args, kwargs, out)
        return out, None

    def _is_own(self, tensor: FakeTensor) -> bool:
        """Whether a tensor of any shape is of this mode, and has no value."""
        return tensor.constant is None and tensor.fake_mode is self

    def _described(self, values: Any, parts: list[Any]) -> bool:
        """Appends all that a result may depend on; whether that is possible."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_own(value):
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

    def _keep(self, key: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if key is None:
            return
        if len(self.known) >= MOST_CALLS:
            self.known.clear()
        parts = [*key[:2]]
        self._described(args, parts)
        self._described((*kwargs, *kwargs.values()), parts)
        self.known[key] = None
        if tuple(parts) == key:  # else a tensor for the result has got its shape just now
            maker = _maker_of(func, args, kwargs, out)
            self.known[key] = (maker, []) if maker else None

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
    if ODD.intersection(func.tags) or schema_of(func).name.partition("::")[2] in NOT_KEPT:
        return None
    if out is None:
        return _nothing
    outs = out if isinstance(out, (list, tuple)) else (out,)
    if not outs or not all(type(each) is FakeTensor and each.constant is None for each in outs):
        return None
    given_by: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given_by:
        if out is value:
            return partial(_argument, place)
    given = list(_tensors((args, tuple(kwargs.values()))))
    storages = {each.untyped_storage()._cdata for each in given}
    own = [each.untyped_storage()._cdata for each in outs]
    if storages.issuperset(own):
        one_device = len({each.fake_device for each in given}) == 1
        return _view if one_device and not schema_of(func).is_mutable else None
    if not storages.isdisjoint(own) or len(set(own)) < len(own) or not all(map(_is_plain, outs)):
        return None
    layouts = [(each.shape, each.stride(), each.dtype, each.fake_device) for each in outs]
    if isinstance(out, torch.Tensor):
        return partial(_new, layouts[0])
    if type(out) in (tuple, list):
        return partial(_several_new, type(out), layouts)
    return None


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
    place: int | str, mode: KeepingFakeMode, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return kwargs[place] if isinstance(place, str) else args[place]


def _new(
    layout: Layout, mode: KeepingFakeMode, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> FakeTensor:
    shape, stride, dtype, device = layout
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        return mode.wrapped(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)


def _several_new(kind: type, layouts: Sequence[Layout], *call: Any) -> Any:
    return kind(_new(layout, *call) for layout in layouts)


def _view(mode: KeepingFakeMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _by_kernel(mode, func, args, kwargs, next(_tensors(args)).fake_device)


def _by_kernel(
    mode: KeepingFakeMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """What PyTorch's kernel makes of the meta tensors within the fake ones."""
    mode.in_kernel_invocation = True
    try:
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)
            out = func(*args, **kwargs)
            outs = out if isinstance(out, (list, tuple)) else (out,)
            # what is no new tensor is an argument, or none at all
            made = [mode.wrapped(each, device) if type(each) is torch.Tensor else each for each in outs]
            return made[0] if outs is not out else type(out)(made)
    finally:
        mode.in_kernel_invocation = False
