"""What is still alive after a probe, and after a plan that was tried and given up."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft_play.job import Job
from sft_play.train import probe as probing
from sft_play.train.session import close_session, prepare_session


def tensor_bytes() -> int:
    """Bytes of all tensors of this process; each storage counts once."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    own = [each.to_local() if isinstance(each, DTensor) else each for each in found]
    storages = [each.untyped_storage() for each in own if each.layout == torch.strided and not each.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parts_of_engine(trainer: Any) -> dict[str, Any]:
    """What a training has made beside the model, by a name."""
    optimizer, wrapped = trainer.optimizer, trainer.model_wrapped
    found = {"optimizer": optimizer, "schedule": trainer.lr_scheduler}
    if wrapped is not trainer.model:
        found["wrapper"] = wrapped
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
        found[type(optimizer).__name__] = optimizer
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{name} {number}": value for name, value in state.items() if torch.is_tensor(value)}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                found[f"gradient {number}.{place}"] = parameter.grad
    return found


@contextmanager
def noting_parts(noted: dict[str, Any]) -> Iterator[None]:
    """In the block, weak references to what a probe is about to let go are added to `noted`."""
    let_go = probing.let_go

    def noting(trainer: Any, engine: Any) -> None:
        noted.update({name: weakref.ref(part) for name, part in parts_of_engine(trainer).items()})
        let_go(trainer, engine)

    probing.let_go = noting
    try:
        yield
    finally:
        probing.let_go = let_go


def remains_of_probes(job: Job) -> dict[str, Any]:
    """Probes a plan, gives it up and probes it again; the names of what is alive after each, and bytes of tensors."""
    noted: dict[str, Any] = {}
    found: dict[str, Any] = {"alive": [], "bytes": []}
    gc.collect()
    gc.freeze()  # what is here already is not looked at again, which would take most of the time
    session = prepare_session(job, announce=False)
    model = weakref.ref(session.trainer.model)
    with noting_parts(noted):
        for _ in range(2):
            before = tensor_bytes()
            probing.probe(session)
            after = tensor_bytes()
            for _ in range(20):  # gloo's threads let go of what was exchanged when they get to it
                if after > before:
                    time.sleep(0.1)
                    after = min(after, tensor_bytes())
            found["bytes"].append((before, after))
            found["alive"].append(sorted(name for name, part in noted.items() if part() is not None))
            found["parts"] = sorted(noted)
            noted.clear()
            if model() is not None:
                job = close_session(session, job.plan)
                del session
                gc.collect()
                found["model_given_up_lives"] = model() is not None
                session = prepare_session(job, announce=False)
    return found
