"""Triton's interpreter, which runs kernels for GPUs on a CPU, for tests of Liger's kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

MISSING = [name for name in ("triton", "liger_kernel") if find_spec(name) is None]
needs_triton = pytest.mark.skipif(
    bool(MISSING) or not os.environ.get("TRITON_INTERPRET"),
    reason="needs liger-kernel and triton (`pip install liger-kernel`), and TRITON_INTERPRET=1",
)


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets the interpreter compute what Liger's kernels do.

    By itself it does not convert numbers among the arguments, adds and multiplies bf16 as if it were whole
    numbers, and knows no libdevice.
    """
    import liger_kernel.ops  # noqa: F401  its kernels are defined here
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    convert, operate = interpreter._implicit_cvt, interpreter.InterpreterBuilder.binary_op

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    def operated(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return operate(self, lhs, rhs, op)
        wide = [self.cast_impl(each, tl.float32) for each in (lhs, rhs)]
        found = op(*(each.data for each in wide))
        if found.dtype == np.bool_:
            return interpreter.TensorHandle(found, tl.int1)
        return self.cast_impl(interpreter.TensorHandle(found, tl.float32), tl.bfloat16)

    def by_numpy(function: Any) -> Any:
        return lambda x: tl.tensor(interpreter.TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", converted)
        patch.setattr(interpreter.InterpreterBuilder, "binary_op", operated)
        patch.setattr(rms_norm, "rsqrt", by_numpy(lambda data: 1 / np.sqrt(data)))
        patch.setattr(geglu, "tanh", by_numpy(np.tanh))
        yield
