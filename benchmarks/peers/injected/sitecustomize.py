"""The stopwatch of the benchmark. Python imports this file at startup, in each process of a contestant.

It waits until the process has imported torch. Then it counts the tokens that embeddings in training mode get,
padding separately, and takes the time when each step begins and ends. A process that has made optimizer steps
writes its record to <PEERS_WATCH>/<process id>.json when it exits. Only the standard library is imported
here, so that it costs nothing in processes that never use torch.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import resource
import sys
import time
from pathlib import Path


class StopWatch:
    """Counts tokens and records when each step ended, by the machine's monotonic clock."""

    def __init__(self, torch, pad_id: int):
        self.torch, self.pad_id = torch, pad_id
        self.tokens = self.padding = self.optimizers = 0
        self.began = 0.0
        self.steps: list[dict[str, float]] = []

    def fed(self, embedding, ids) -> None:
        """Counts the tokens of a micro-batch, unless it is symbolic (on the meta device, or fake)."""
        if not embedding.training or ids.device.type == "meta":
            return
        if not self.tokens:
            self.began = time.monotonic()
        with self.torch.no_grad():
            padding = (ids == self.pad_id).sum()
        if type(padding) is self.torch.Tensor:
            self.padding += int(padding)
            self.tokens += ids.numel() - int(padding)

    def stepped(self, optimizer, *_) -> None:
        """Ends a step, to which all tokens since the previous one belong."""
        if not hasattr(optimizer, "stop_watch_number"):
            optimizer.stop_watch_number = self.optimizers
            self.optimizers += 1
        now = {"began": self.began, "time": time.monotonic(), "optimizer": optimizer.stop_watch_number}
        self.steps.append(now | {"tokens": self.tokens, "padding": self.padding})
        self.tokens = self.padding = 0

    def write(self, folder: Path) -> None:
        """Writes the record if this process has trained."""
        if not self.steps:
            return
        about = {
            "torch": self.torch.__version__,
            "threads": self.torch.get_num_threads(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "steps": self.steps,
        }
        (folder / f"{os.getpid()}.json").write_text(json.dumps(about), encoding="utf-8")


def install(torch) -> None:
    """Hooks a stopwatch into torch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watch = StopWatch(torch, int(os.environ["PEERS_PAD_ID"]))
    forward = torch.nn.Embedding.forward

    def counted(self, input):
        watch.fed(self, input)
        return forward(self, input)

    torch.nn.Embedding.forward = counted
    register_optimizer_step_post_hook(watch.stepped)
    atexit.register(watch.write, Path(os.environ["PEERS_WATCH"]))


class AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be imported as usual, and installs the stopwatch right afterwards."""

    def find_spec(self, name, path=None, target=None):
        """Handles only torch; stays until the import, since libraries also check whether torch exists."""
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            sys.meta_path.remove(self)
            run(module)
            install(module)

        spec.loader.exec_module = exec_module
        return spec


if "PEERS_WATCH" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
