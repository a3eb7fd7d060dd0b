"""Broken inputs through the code of the commands: each must end in a result or one error.

    make fuzz                                   # 10,000 cases; benchmarks/results/fuzz.json
    make fuzz ARGS="--seed 7 --cases 500"
    make fuzz ARGS="--seed 7 --case 123"        # one case again, with its input

A case fails if it raises anything but an error for the user, ends otherwise than promised, takes more CPU
time than its kind may (5 s for most), or if a process needs more than 1.7 GB. A random share of the
cases are processes of their own, which train; the others run in the process of a worker, or in a copy of it.
"""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.pool
import os
import platform
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

from benchmarks.markdown import RESULTS
from sft_play.commands.check import ERROR, OK, WARNING, check
from sft_play.config.schema import DataConfig, ModelConfig
from sft_play.data import limits
from sft_play.data.chat import Chat, make_chat
from sft_play.data.reading import read_rows
from sft_play.data.sources import open_source
from sft_play.data.template import check_template, use_template
from sft_play.data.workers import EncodingTask, encode_chunk
from sft_play.errors import SftPlayError
from sft_play.fingerprints import installed_versions
from sft_play.machine.gpus import detect
from sft_play.rows.formats import Conversation, detect_format
from tests.stress.fuzz_cases import KINDS, PROCESS, make_case
from tests.stress.fuzz_runs import CHATML, RUNNERS, Setting
from tests.stress.mutations import ROWS, RUN, Case

CASES = 10_000
RESULT = RESULTS / "fuzz.json"
CPU_SECONDS = 5.0
# Each pattern may take 2 s, and processes import libraries or train.
SECONDS_OF = {"pattern": 20.0, "console": 60.0, PROCESS: 180.0}
CLOCK_SECONDS, BYTES = 600.0, 1_700 * 10**6  # half of it: the arrays by which a plan measures a CPU
TEMPLATE_SECONDS = 1.0  # what a template may take in these cases
LEVELS = (ERROR, WARNING, OK)
LONGEST_MESSAGE = 3000  # characters


@dataclass(frozen=True)
class Outcome:
    """What became of a case: `problem` is None if it ended as it should."""

    number: int
    kind: str
    said: str
    seconds: float
    problem: str | None = None


def byte_tokenizer() -> Any:
    """A tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<|end|>", *alphabet])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", chat_template=CHATML)


def make_setting(folder: Path) -> Setting:
    """The setting of cases in `folder`, which becomes the current one."""
    os.chdir(folder)
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    return Setting(folder, make_chat(byte_tokenizer(), "assistant", 4096), detect())


def run_case(case: Case, setting: Setting) -> str:
    """Runs a case; returns what became of it in a word or two.

    Raises:
        SftPlayError: the input was refused, as most of them should be.
    """
    if case.kind in RUNNERS:
        return RUNNERS[case.kind](case, setting)
    file = setting.folder / f"case{case.suffix}"
    file.write_bytes(case.content)
    if case.kind == "config":
        findings = check(str(file), case.overrides, machine=setting.machine)
        return min((finding.level for finding in findings), key=LEVELS.index)
    if case.kind == "model":
        from sft_play.model.load import load_model_config

        (setting.folder / "config.json").write_bytes(case.content)
        load_model_config(ModelConfig(name=str(setting.folder)))
        return "ok"
    if case.kind == "template":
        setting.chat.tokenizer.chat_template = CHATML
        use_template(setting.chat.tokenizer, str(file))
        messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        check_template(setting.chat.tokenizer, Conversation(messages, source="row:1"), str(file))
        file = setting.folder / "two.jsonl"
        file.write_text('{"question": "a", "answer": "b"}\n' * 2)
    else:
        setting.chat.tokenizer.chat_template = CHATML
    return _encode(file, setting.chat)


def _encode(file: Path, chat: Chat) -> str:
    rows = list(read_rows(open_source(str(file), "train")))
    if not rows:
        return "no rows"
    data = DataConfig(train_path=str(file))
    chunk = encode_chunk(EncodingTask(chat, detect_format(rows[0]), None, data.overlong), rows)
    return "rows" if len(chunk.rows) else "all dropped"


def judge(number: int, case: Case, setting: Setting) -> Outcome:
    """Runs a case and decides whether it ended as it should."""
    began = _cpu_seconds()
    problem = None
    try:
        said = run_case(case, setting)
    except SftPlayError as error:
        said = f"exit {error.exit_code}"
        if error.exit_code == 1 or not 0 < len(str(error)) < LONGEST_MESSAGE:
            problem = f"a message of {len(str(error))} characters with exit code {error.exit_code}"
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        said, problem = type(error).__name__, traceback.format_exc()
    seconds = _cpu_seconds() - began
    if seconds > SECONDS_OF.get(case.kind, CPU_SECONDS):
        problem = problem or f"it took {seconds:.1f} s"
    return Outcome(number, case.kind, said, seconds, problem)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def peak_bytes() -> int:
    """The most memory that this process or a child of it has had."""
    used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(used) * 1024


def work(seed: int, numbers: list[int], kinds: tuple[str, ...], results: Connection) -> None:
    """Runs cases in a process of its own; sends an Outcome for each, and at the end the peak memory."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")
    limits.ROW_SECONDS = TEMPLATE_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SFT_PLAY_CACHE"] = f"{folder}/cache"
        setting = make_setting(Path(folder))
        sound = Path(folder) / "sound.json"
        sound.write_text(json.dumps(RUN))
        check(str(sound), machine=setting.machine)  # or the first case would pay for all imports and a model
        for number in numbers:
            results.send(judge(number, make_case(seed, number, kinds), setting))
    results.send(peak_bytes())


def run_share(seed: int, numbers: list[int], kinds: tuple[str, ...]) -> tuple[list[Outcome], int]:
    """The outcomes of some cases, and the peak memory; a worker that hangs or dies is replaced."""
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome] = []
    peak = 0
    while numbers:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(seed, numbers, kinds, sender))
        worker.start()
        sender.close()
        with contextlib.suppress(EOFError):
            while receiver.poll(CLOCK_SECONDS):
                found = receiver.recv()
                if isinstance(found, int):
                    peak = max(peak, found)
                    break
                outcomes.append(found)
                if found.problem:
                    print(f"case {found.number} ({found.kind}) fails", flush=True)
                numbers = numbers[1:]
        alive = worker.is_alive()
        worker.kill() if numbers else None
        worker.join()
        if numbers:
            kind = make_case(seed, numbers[0], kinds).kind
            problem = "it hangs" if alive else f"it ended its process ({worker.exitcode})"
            outcomes.append(Outcome(numbers[0], kind, "dead", CLOCK_SECONDS, problem))
            numbers = numbers[1:]
    return outcomes, peak


def report(seed: int, outcomes: Sequence[Outcome], peak: int) -> list[str]:
    """Prints what became of the cases; returns the failures, one text each."""
    for kind in KINDS:
        counts = Counter(outcome.said for outcome in outcomes if outcome.kind == kind)
        told = ", ".join(f"{count} {said}" for said, count in counts.most_common())
        share = sum(counts.values()) / len(outcomes)
        print(f"{kind:9} {sum(counts.values()):6,} cases ({share:.1%}): {told}")
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    print(f"slowest: case {slowest.number} ({slowest.kind}) with {slowest.seconds:.1f} s of CPU time")
    print(f"peak memory of a process: {peak / 10**6:,.0f} MB")
    failures = [
        f'{outcome.kind}: make fuzz ARGS="--seed {seed} --case {outcome.number}"\n{outcome.problem}'
        for outcome in outcomes
        if outcome.problem
    ]
    if peak > BYTES:
        failures.append(f"a process had {peak / 10**6:,.0f} MB; allowed: {BYTES / 10**6:,.0f} MB")
    return failures


def write_result(seed: int, outcomes: Sequence[Outcome], peak: int, seconds: float) -> None:
    """Writes what became of the cases of a whole run."""
    kinds = {kind: Counter(outcome.said for outcome in outcomes if outcome.kind == kind) for kind in KINDS}
    tree = {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": installed_versions(),
        "seed": seed,
        "cases": len(outcomes),
        "ended_otherwise_than_they_should": [outcome.number for outcome in outcomes if outcome.problem],
        "said": {kind: dict(counts.most_common()) for kind, counts in kinds.items()},
        "slowest_cpu_seconds": round(max(outcome.seconds for outcome in outcomes), 2),
        "peak_bytes_of_a_process": peak,
        "seconds": round(seconds),
    }
    RESULT.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Runs the cases; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--case", type=int, help="run this case alone and show its input")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    kinds = tuple(args.kinds)
    print(f"seed {seed}")
    numbers = list(range(args.cases)) if args.case is None else [args.case]
    if args.case is not None:
        print(make_case(seed, args.case, kinds))
    began = time.monotonic()
    shares = [numbers[start :: args.workers] for start in range(args.workers)]
    with multiprocessing.pool.ThreadPool(args.workers) as pool:
        found = pool.starmap(run_share, [(seed, share, kinds) for share in shares if share])
    outcomes = [outcome for share, _ in found for outcome in share]
    peak, seconds = max(peak for _, peak in found), time.monotonic() - began
    failures = report(seed, outcomes, peak)
    if len(outcomes) >= CASES and kinds == KINDS:
        write_result(seed, outcomes, peak, seconds)
    print(f"{len(failures)} of {len(outcomes):,} cases fail; {seconds:.0f} s")
    print("\n\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
