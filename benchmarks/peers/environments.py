"""A virtual environment for each peer, since it needs other versions than this project."""

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENTS_FOLDER = Path(".venv-peers")
TORCH = "torch==2.13.0"  # the same everywhere; installed first, so that it satisfies what follows
LIST_PACKAGES = (
    "import json; from importlib.metadata import distributions;"
    "print(json.dumps({d.metadata['Name'].lower(): d.version for d in distributions()}))"
)


class CannotInstall(Exception):
    """An environment could not be created; the message says why."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment: the arguments of each pip call, and modules of which only the name is needed."""

    name: str
    calls: tuple[tuple[str, ...], ...] = ()
    stand_ins: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the environment."""
        return (ENVIRONMENTS_FOLDER / self.name).absolute() if self.calls else Path(sys.prefix)

    def program(self, name: str) -> str:
        """The path of one of its programs."""
        return str(self.folder / "bin" / name)

    def versions(self) -> dict[str, str]:
        """The versions of all packages in it."""
        done = subprocess.run(
            [self.program("python"), "-I", "-c", LIST_PACKAGES], capture_output=True, check=True
        )
        return dict(sorted(json.loads(done.stdout).items()))

    @functools.cached_property
    def _recipe(self) -> str:
        return json.dumps([sys.version_info[:2], self.calls, self.stand_ins])

    def install(self) -> None:
        """Creates it, unless it was created with the same arguments.

        Raises:
            CannotInstall: pip failed.
        """
        ready = self.folder / ".ready"
        if not self.calls or (ready.exists() and ready.read_text(encoding="utf-8") == self._recipe):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(self.folder)])
        for words in self.calls:
            _run([self.program("python"), "-m", "pip", "install", "--quiet", *words])
        for name in self.stand_ins:
            (site,) = self.folder.glob("lib/python*/site-packages")
            (site / f"{name}.py").write_text('"""Nothing of this is used here."""\n', encoding="utf-8")
        ready.write_text(self._recipe, encoding="utf-8")


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        told = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        raise CannotInstall(told[0] if told else f"exit code {done.returncode}")


# What LLaMA-Factory requires, except torchvision, torchaudio and the web interface. The first two would bring
# another torch or CUDA's libraries, and the rows here are text; but it imports torchaudio in any case.
_LLAMA_FACTORY = (
    (
        "accelerate==1.11.0",
        "datasets==4.0.0",
        "peft==0.18.1",
        "transformers==5.6.0",
        "trl==0.24.0",
        "av==16.0.0",
    )
    + (
        "torchdata==0.11.0",
        "tyro==0.8.14",
        "einops",
        "fastapi",
        "fire",
        "hf-transfer",
        "matplotlib",
        "modelscope",
    )
    + ("numpy", "omegaconf", "packaging", "pandas", "protobuf", "pydantic", "pyyaml", "safetensors", "scipy")
    + ("sentencepiece", "sse-starlette", "tiktoken", "uvicorn")
)
ENVIRONMENTS = {
    each.name: each
    for each in (
        Environment("project"),
        Environment(
            "llamafactory",
            ((TORCH,), (TORCH, *_LLAMA_FACTORY), ("--no-deps", "llamafactory==0.9.5")),
            stand_ins=("torchaudio",),
        ),
        Environment("torchtune", ((TORCH,), (TORCH, "torchtune==0.6.1", "torchao==0.9.0"))),
        Environment("litgpt", ((TORCH,), (TORCH, "litgpt==0.5.13", "requests"))),
    )
}
