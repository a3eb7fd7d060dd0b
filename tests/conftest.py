"""Shared by all tests: offline, quiet, a cache of their own, and tiny models made on the spot."""

import gc
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sft_play.launch.environment import find_own_programs
from sft_play.ui.console import set_console
from sft_play.upstream.patching import undone
from tests.packages import needs_tiles

find_own_programs()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SFT_PLAY_MAKE"] = "1"  # messages have the targets of make
os.environ["TERM"] = "xterm"  # a dumb one shows no live lines
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as the command line does
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when kernels are defined, as Triton's own are on import

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # several workers share the cores
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
# a suite in the background of a shell would ignore Ctrl-C, one under nohup a closed terminal, and its tests too
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests start hundreds of processes, and each would compile the package anew, as each worker would these files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Most of what tests make is freed without the collector, which would look at it a hundred times a second.
gc.set_threshold(20_000, 10, 10)

pytest_plugins = ["tests.finished", "tests.together"]
REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
FOUND, KEPT_S = REPOSITORY / ".cache" / "tests", 2 * 24 * 3600.0
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(FOUND / "extensions"))  # another checkout compiles its own
VOCABULARY = 256
THOROUGH = "pytest.mark.thorough"
_modules = len(sys.modules)  # whose objects the garbage collector no longer looks at


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than cores, which are idle while a test waits for other processes, or for a time to pass."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session")
def make_cache() -> Callable[[Path], Path]:
    """Makes a folder a cache in which nothing was measured, but all that tests have ever traced or asked is known.

    A trace takes seconds, and is the same whoever makes it: its key holds our sources and the versions of all
    libraries. A measurement changes what later plans predict.
    """

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("answers", "traces"):
            found = FOUND / kind
            found.mkdir(parents=True, exist_ok=True)
            if not (folder / kind).is_symlink():
                (folder / kind).symlink_to(found)
        return folder

    return make


@pytest.fixture(scope="session", autouse=True)
def _cache_of_worker(make_cache, tmp_path_factory) -> Iterator[None]:
    """For fixtures of modules, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFT_PLAY_CACHE", str(make_cache(tmp_path_factory.getbasetemp() / "cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _libraries_as_before() -> Iterator[None]:
    """What a module's tests change in libraries for the rest of a command, as training does, is not its worker's."""
    with undone():
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    """Forgets what was found before the sources were changed, days ago."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for path in FOUND.glob("*/*"):
            if time.time() - path.stat().st_mtime > KEPT_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends without the collections that pytest makes of all that was imported, which take seconds in each worker."""
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Asked for thorough tests alone, leaves files without one out: to import all files takes half a minute."""
    if not collection_path.name.startswith("test_") or not config.option.markexpr.startswith("thorough and"):
        return None
    return None if THOROUGH in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Holds what `pytest_ignore_collect` takes for granted; skips models whose pictures no old library knows.

    Raises:
        UsageError: a file has a thorough test and does not name the mark.
    """
    for item in items:
        if "smolvlm" in item.name or "idefics3" in item.name:
            item.add_marker(needs_tiles)
    marked = {item.path for item in items if item.get_closest_marker("thorough")}
    hidden = [str(path) for path in sorted(marked) if THOROUGH not in path.read_text()]
    if hidden:
        raise pytest.UsageError(f"{', '.join(hidden)}: mark thorough tests in their own file, by {THOROUGH}")


@pytest.fixture(autouse=True)
def _libraries_are_not_collected():
    """As in a run: what is imported stays, and each full collection would look at all of it, for 0.2 s."""
    global _modules
    if len(sys.modules) > _modules + 100:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)


@pytest.fixture(autouse=True)
def _own_console():
    """A console keeps the width, and the colours, of the environment in which it was made."""
    set_console(None)
    yield
    set_console(None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For runs in this process: tests run side by side, and with more threads sums change their order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model folder as save_pretrained() writes it: a 2-layer random Llama with a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-model")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}"
        "{% if m.role == 'assistant' %}{{ '<eos> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files cannot grow beyond this, as on a full disk; pytest's own neither, so keep the block short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def token_rows(count: int, seed: int = 0, longest: int = 60) -> list[dict]:
    """Random tokenized rows: a prompt that is not learned, then an answer that is."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(5, longest))]
        prompt = rng.randint(1, len(ids) - 1)
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "length": len(ids)})
    return rows
