"""The tables and figures of the documentation, made from benchmarks/results, the cookbook and the planner.

A page holds each of them between two comments, `<!-- make docs: NAME -->` and `<!-- end -->`, where NAME is a
key of TABLES. The pages are written by scripts/docs/__main__.py.
"""

import re
import statistics
from operator import itemgetter
from typing import Literal

import yaml

from benchmarks.markdown import RESULTS, ROOT, results, signed, table
from scripts.docs.data_formats import data_formats, examples
from scripts.docs.memory_tables import (
    compilations,
    compiled_on_a_cpu,
    divided_on_a_cpu,
    evidence,
    evidence_overlap,
    evidence_seconds,
    evidence_sharded,
    gpu_proofs,
    memory_on_a_cpu,
    other_random_runs,
    outside_on_a_gpu,
    published,
    random_on_a_cpu,
    reserved,
    run_on_a_gpu,
    seconds_on_a_gpu,
    speeds_on_a_gpu,
    steps_on_a_gpu,
)
from sft_play.commands.command_line import INTERRUPTED_BY_USER
from sft_play.config.train import TrainConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import SftPlayError
from sft_play.planning.candidates.batch import batch_choices, count_steps, scaled_learning_rate
from sft_play.spelling import FLAGS, OVERRIDES, SWITCHES, TARGETS
from sft_play.units import format_bytes

SEVERAL = {"ddp": "DDP", "deepspeed_z2": "ZeRO-2", "fsdp2": "FSDP2"}  # engines of make bench-sharding
FEWEST = "## The fewest GPUs"  # a section of the cookbook, with a table of another kind
LONGEST = "## The longest rows"  # the section after it
COOKBOOK = ROOT / "docs" / "reference" / "cookbook.md"
MARKED = re.compile(r"(<!-- make docs: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTESTANTS = {
    "**SFT-Play, its own plan**": ("sft-play",),
    "SFT-Play, packed": ("sft-play packed",),
    "bare PyTorch loop, batches of similar length": ("bare loop by length",),
    "bare PyTorch loop, random batches": ("bare loop",),
    "torchtune {torchtune} / packed": ("torchtune", "torchtune packed"),
    "LitGPT {litgpt}": ("litgpt",),
    "LLaMA-Factory {llamafactory} / neat packing": ("llama-factory", "llama-factory packed"),
    "TRL {trl} / packed": ("trl", "trl packed"),
}
STARTS = {
    "SFT-Play, empty cache": "sft-play",
    "SFT-Play, device profile known": "sft-play, profile known",
    "SFT-Play, the same run again": "sft-play, the same run again",
    "bare PyTorch loop, random batches": "bare loop",
    "bare PyTorch loop, batches of similar length": "bare loop by length",
}
# The example of MULTI_GPU_GUIDE.md.
GUIDE_ROWS = 29_500
GPU_COUNTS = (1, 2, 4, 8)
SCALINGS: tuple[Literal["none", "sqrt", "linear"], ...] = ("none", "sqrt", "linear")
DIED = "`rank 1 died without reporting an error: "
FAULTS = {
    "raise": ("a rank raises an exception", "its traceback, or one line for a known error"),
    "kill": ("a rank is killed (memory, `kill -9`)", DIED + "killed by SIGKILL`"),
    "segfault": ("a rank crashes (SIGSEGV)", DIED + "killed by SIGSEGV`"),
    "exit": ("a rank exits silently", DIED + "crashed or killed`"),
    "sleep": ("a rank hangs in Python", "`rank 1 hangs`, with its current step and its stack"),
    "spin": ("a rank hangs while holding the GIL", "the same"),
    "stop": ("a rank is stopped (SIGSTOP)", "`rank 1 hangs`, with its current step, but no stack"),
    "kill -9 of the launcher": (
        "`accelerate launch` is killed with -9",
        "`accelerate launch was killed by SIGKILL`",
    ),
    "kill -9 of the command": (
        "the command itself is killed with -9",
        "nothing: no process is left to report it",
    ),
    "torchrun raise": ("a rank raises, under torchrun", "its error message, then torchrun's summary"),
    "torchrun sleep": ("a rank hangs, under torchrun", "the other ranks report who was last seen where"),
}
KILLS = {
    "data": "preparing data",
    "save": "saving a checkpoint",
    "result": "saving the result",
    "merge": "merging",
    "fsdp2": "training to the end, two processes with FSDP2, LoRA",
    "fsdp2_full": "training to the end, two processes with FSDP2, full fine-tuning",
    "zero3": "training to the end, two processes with ZeRO-3, LoRA",
    "zero3_full": "training to the end, two processes with ZeRO-3, full fine-tuning",
    "ddp": "saving a checkpoint, two processes with DDP",
    "zero2": "saving a checkpoint, two processes with ZeRO-2",
}


def peers() -> str:
    """Tokens per second, padding and held-out loss of each toolkit, for both sets of rows."""
    tree = results("peers_cpu")
    versions = {name: packages.get(name, "") for name, packages in tree["versions"].items()}
    versions["trl"] = tree["versions"]["project"]["trl"]
    measured = {data: {one["contestant"]: one for one in tree["results"][data]} for data in tree["results"]}
    rows = []
    for name, contestants in CONTESTANTS.items():
        cells = [name.format(**versions)]
        for data, shown in (("gsm8k", "{loss:.3f}"), ("tailed", None)):
            runs = [measured[data][one] for one in contestants]
            for form in filter(None, ("{tokens_per_second:,.0f}", "{padding_share:.0%}", shown)):
                cells.append(" / ".join(form.format(**run) for run in runs))
        rows.append(cells)
    head = ("", "GSM8K: tokens/s without padding", "padding", "held-out loss")
    return table((*head, "long-tailed: tokens/s", "padding"), rows)


def start_up() -> str:
    """Seconds to the end of the first step."""
    medians = results("start_up_cpu")["medians"]
    rows = ((name, f"{medians[key]['start_up_seconds']:.1f}") for name, key in STARTS.items())
    return table(("", "seconds to the end of the first step"), rows)


def planner() -> str:
    """The planner's choice in each workload, beside the fastest plan, and errors of predicted step times."""
    rows = []
    for one in results("planner_cpu")["summary"]:
        figures = (f"{one['regret']:.1%}", signed(one["error_of_chosen"], 0), f"{one['error_median']:.0%}")
        rows.append([one["workload"], str(one["plans"]), one["chosen"], one["best"], *figures])
    errors = ("error of its predicted seconds", "median of all plans")
    return table(("workload", "plans", "chosen", "fastest", "slower by", *errors), rows)


def several_processes() -> str:
    """Seconds of steps on two and four processes of a CPU with each engine: predicted / measured."""
    if not (RESULTS / "sharding_time.json").exists():
        return "Not measured yet."
    rows = []
    for one in results("sharding_time")["summary"]:
        if one["processes"] == 1:
            continue  # nothing to choose
        seconds = [f"{one['predicted'][name]:.2f} / {one['measured'][name]:.2f}" for name in SEVERAL]
        chosen, best = (engine_of(one[which]).label for which in ("chosen", "best"))
        rows.append([one["case"], str(one["processes"]), chosen, best, f"{one['regret']:.1%}", *seconds])
    return table(("workload", "processes", "chosen", "fastest", "slower by", *SEVERAL.values()), rows)


def plan_time() -> str:
    """CPU seconds and memory of the first and the second plan of each case, the best of the rounds."""
    rows = []
    for name, rounds in results("plan_time")["rounds"].items():
        best = [
            min((one[when] for one in rounds), key=itemgetter("cpu_seconds"))
            for when in ("before", "first", "again")
        ]
        seconds = [f"{one['cpu_seconds']:.1f}" for one in best]
        rows.append([name, *seconds, *(format_bytes(one["peak_bytes"]) for one in best[1:])])
    head = ("plan", "first, at 1dbe8e5", "first, CPU seconds", "again", "first, memory", "again")
    return table(head, rows)


def faults() -> str:
    """What each fault of a rank looks like, the exit code and the seconds until all processes have ended."""
    measured = {one["fault"]: one for one in results("faults")["faults"]}
    rows = []
    for name, (fault, seen) in FAULTS.items():
        code = measured[name]["exit_code"]
        shown = str(code) if code >= 0 else "-"
        rows.append([fault, seen, shown, f"{measured[name]['seconds']:.1f}"])
    return table(("fault", "what you see", "exit code", "seconds"), rows)


def kills() -> str:
    """How many runs were killed with -9 where, and how they went on."""
    rows = []
    for kind, found in results("kills")["kinds"].items():
        same = f"{found['went_on_to_the_same_weights']} of {found['trials']}"
        rows.append([KILLS[kind], same, str(found["most_intervals_lost"])])
    return table(("killed while", "ended with the same weights", "most intervals lost"), rows)


def beside_trl() -> str:
    """What plain TRL does with a fault, where it was measured."""
    tree = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text(encoding="utf-8"))
    rows = ((one["fault"], one["trl"], one["here"]) for one in tree["beside_trl"])
    return table(("fault", "plain TRL", "here"), rows)


def prepare() -> str:
    """Tokens per second of preparing data, beside the datasets library."""
    tree, theirs = results("prepare_speed"), "load_dataset and map"
    medians = {name: tree["tokens"][name] / statistics.median(each) for name, each in tree["seconds"].items()}
    rows = []
    for name, seconds in tree["seconds"].items():
        rates = [f"{tree['tokens'][name] / each:,.0f}" for each in (max(seconds), min(seconds))]
        share = f"{medians[name] / medians[theirs]:.0%}"
        rows.append([name, f"{medians[name]:,.0f}", share, " to ".join(rates), str(len(seconds))])
    return table(("", "tokens/s, median", f"of {theirs}", "slowest to fastest round", "rounds"), rows)


def prepare_memory() -> str:
    """Peak memory of preparing data, by the number of rows."""
    measured = results("prepare_memory")["measured"]
    rows = ((f"{one['rows']:,}", f"{one['prepare_peak_bytes'] / 2**20:,.0f}") for one in measured)
    return table(("rows", "peak MiB"), rows)


def prepare_long() -> str:
    """Peak memory of preparing long rows, whole and split, and of reading them back packed."""
    rows = (
        (
            f"{one['rows_read']} of {one['row_tokens']:,} tokens",
            "split" if one["split"] else "whole",
            f"{one['prepare_peak_bytes'] / 2**20:,.0f}",
            f"{one['read_bytes'] / 2**20:,.0f}",
        )
        for one in results("prepare_long")["measured"]
    )
    return table(("rows", "", "peak MiB", "to read them, MiB"), rows)


def kept_batch() -> str:
    """The arithmetic of an effective batch that stays, on several numbers of GPUs."""
    train, rows = TrainConfig(effective_batch_size=64, batch_size=4), []
    for gpus in GPU_COUNTS:
        (cut,) = batch_choices(train, gpus, None)
        steps, _ = count_steps(train, GUIDE_ROWS, cut.effective)
        rows.append(
            [f"{n:,}" for n in (gpus, cut.micro, cut.accumulation, cut.effective, steps)] + ["as set"]
        )
    head = ("GPUs", "micro-batch", "accumulation", "effective batch", "steps per epoch", "learning rate")
    return table(head, rows)


def grown_batch() -> str:
    """The arithmetic of one that grows with the GPUs, and the learning rate under each scaling rule."""
    train, rows = TrainConfig(batch_size=4, grad_accum=1), []
    for gpus in GPU_COUNTS:
        (cut,) = batch_choices(train, gpus, None)
        steps, _ = count_steps(train, GUIDE_ROWS, cut.effective)
        rates = (_scaled(scaling, cut.effective) for scaling in SCALINGS)
        rows.append([f"{gpus}", f"{cut.effective}", f"{steps:,}", *rates])
    head = ("GPUs", "effective batch", "steps per epoch", "`lr_scaling: none`", "`sqrt`", "`linear`")
    return table(head, rows)


def _scaled(scaling: Literal["none", "sqrt", "linear"], effective: int) -> str:
    reference = None if scaling == "none" else 4
    train = TrainConfig(learning_rate=1e-4, lr_scaling=scaling, reference_batch_size=reference)
    return f"{scaled_learning_rate(train, effective):.1e}".replace("e-0", "e-")


def exit_codes() -> str:
    """Every exit code and what it means."""
    kinds = {1: "A bug in SFT-Play, with a traceback; please report it."}
    for kind in SftPlayError.__subclasses__():
        kinds[kind.exit_code] = (kind.__doc__ or "").splitlines()[0]
    kinds |= {0: "Success.", INTERRUPTED_BY_USER: "Ended at once by a signal; checkpoints saved before stay."}
    return table(("code", "meaning"), ([str(code), meaning] for code, meaning in sorted(kinds.items())))


def largest_models() -> str:
    """The largest model of the cookbook that fits, for each machine and method."""
    rows = []
    for section in COOKBOOK.read_text(encoding="utf-8").partition(FEWEST)[0].split("\n## ")[1:]:
        lines = section.splitlines()
        head, _, *models = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        largest = ["-"] * (len(head) - 1)
        for name, *cells in models:  # from the smallest on
            largest = [name if cell != "-" else before for cell, before in zip(cells, largest, strict=True)]
        rows.append([lines[0], *largest])
    return table(("machine", "full fine-tuning", "LoRA", "QLoRA"), rows)


def highlights() -> str:
    """One line for each benchmark."""
    lines = {"Speed": _speed(), "Memory": _memory(), "Plans": _plans(), "Faults": _killed()}
    link = "- **[{0}](docs/benchmarks.md#{1}).** {2}"
    return "\n".join(link.format(name, name.lower(), text) for name, text in lines.items())


def _speed() -> str:
    ratios, losses = [], []
    for entries in results("peers_cpu")["results"].values():
        runs = {one["contestant"]: one for one in entries}
        ours, theirs = runs["sft-play"], runs["torchtune"]
        ratios.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
        losses.append(abs(ours["loss"] - theirs["loss"]))
    return (
        f"On two CPU cores, {ratios[0]:.2f} times the tokens per second of torchtune's default with rows of "
        f"GSM8K and {ratios[1]:.2f} times with long-tailed rows. Held-out losses differ by at most "
        f"{max(losses):.3f}."
    )


def _memory() -> str:
    errors, random = list(map(abs, published("allocated"))), results("random")
    uneven, held_out = random["errors"]["all"], results("random_heldout")["errors"]["all"]
    all_drawn = [row["number"] for row in random["rows"]] == list(range(len(random["rows"])))
    sample = "settings drawn at random" if all_drawn else "random settings, some of them picked,"
    return (
        f"{len(errors)} peaks of allocated memory that others measured on GPUs were predicted without a GPU: "
        f"the median error is {100 * statistics.median(errors):.1g}%, the worst {max(errors):.2%}. Of "
        f"{uneven['runs']} runs on a CPU with {sample} and rows of 1 to 800 tokens, "
        f"{uneven['within_target']} were within 0.1% of the prediction, which was at most "
        f"{-uneven['worst_low']:.2%} too low and {uneven['worst_high']:.2%} too high, after the misses of a "
        f"first round were fixed. Of {held_out['runs']} runs with another seed, {held_out['within_target']} "
        f"were within 0.1%, at most {-held_out['worst_low']:.2%} too low and "
        f"{held_out['worst_high']:.2%} too high, after one more fix."
    )


def _plans() -> str:
    regrets = [one["regret"] for one in results("planner_cpu")["summary"]]
    return (
        f"For {regrets.count(0.0)} of {len(regrets)} small CPU workloads, the chosen plan was the fastest; "
        f"for the others it was at most {max(regrets):.1%} slower than the fastest."
    )


def _killed() -> str:
    kinds = results("kills")["kinds"].values()
    trials, same = (sum(one[key] for one in kinds) for key in ("trials", "went_on_to_the_same_weights"))
    return (
        f"Of {trials} runs killed with SIGKILL and resumed, {same} ended with the weights of an undisturbed "
        "run."
    )


def spellings() -> str:
    """What to type without make for each target of the Makefile that is for users."""
    rows = [
        (f"`make {target}`", f"`sft-play {words}`") for target, words in TARGETS.items() if target != words
    ]
    renamed = ((name, flag) for name, flag in {**FLAGS, **SWITCHES}.items() if flag != f"--{_kebab(name)}")
    flags = [(f"`{name}=`", f"`{flag}`") for name, flag in renamed]
    rows += flags + [(f"`{name}=`", f"`{form.format('...')}`") for name, form in OVERRIDES.items()]
    return table(("with make", "without"), rows)


def _kebab(name: str) -> str:
    return name.lower().replace("_", "-")


TABLES = {
    "spellings": spellings,
    "peers": peers,
    "start-up": start_up,
    "planner": planner,
    "plan-time": plan_time,
    "memory-on-a-cpu": memory_on_a_cpu,
    "divided-on-a-cpu": divided_on_a_cpu,
    "several-processes": several_processes,
    "random-on-a-cpu": random_on_a_cpu,
    "other-random-runs": other_random_runs,
    "compiled-on-a-cpu": compiled_on_a_cpu,
    "compilations": compilations,
    "evidence": evidence,
    "evidence-seconds": evidence_seconds,
    "evidence-overlap": evidence_overlap,
    "evidence-sharded": evidence_sharded,
    "gpu-proofs": gpu_proofs,
    "steps-on-a-gpu": steps_on_a_gpu,
    "run-on-a-gpu": run_on_a_gpu,
    "outside-on-a-gpu": outside_on_a_gpu,
    "seconds-on-a-gpu": seconds_on_a_gpu,
    "speeds-on-a-gpu": speeds_on_a_gpu,
    "reserved": reserved,
    "faults": faults,
    "kills": kills,
    "beside-trl": beside_trl,
    "prepare": prepare,
    "prepare-memory": prepare_memory,
    "prepare-long": prepare_long,
    "kept-batch": kept_batch,
    "grown-batch": grown_batch,
    "exit-codes": exit_codes,
    "largest-models": largest_models,
    "data-formats": data_formats,
    "data-examples": examples,
    "highlights": highlights,
}


def filled(text: str) -> str:
    """A page with all of its tables as they are now.

    Raises:
        KeyError: a comment names a table that does not exist.
    """
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)
