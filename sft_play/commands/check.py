"""`make check`: finds problems before a run starts; each finding is ok, a warning or an error, with a fix."""

import contextlib
import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from sft_play.builtin.demo import materialise
from sft_play.config.inputs import BUILTIN, DataInput, data_inputs
from sft_play.config.load import ResolvedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.data.folders import SUFFIXES
from sft_play.data.inventory import inventory, remark_lines
from sft_play.data.sources import HUB_NAME, Source, is_local, open_input
from sft_play.errors import ConfigError, DataError, DoesNotFitError, first_line
from sft_play.machine.cuda import why_left_out, why_unusable
from sft_play.machine.gpus import Machine, detect, with_freest
from sft_play.machine.host import existing_folder, free_bytes, missing
from sft_play.model.weights.files import TOKENIZER_FILES, has_tokenizer, missing_shards, require_own_weights
from sft_play.plan import Device, Plan
from sft_play.planning.candidates.drafts import precision_reason, require_possible
from sft_play.report.layout import subject
from sft_play.report.machine import process_text
from sft_play.spelling import login, make, var
from sft_play.ui.progress import PLANNING, spinner
from sft_play.ui.screen import NamedValues
from sft_play.units import GIB, counted, format_bytes, tallied
from sft_play.upstream.huggingface_hub import limit_network

OK, WARNING, ERROR = "ok", "warning", "error"
STYLES = {OK: "green", WARNING: "yellow", ERROR: "red"}
HUB_TIMEOUT_S = 5
DISK_ERROR_BYTES, DISK_WARNING_BYTES = 1 * GIB, 10 * GIB
BUSY_SHARE = 0.1  # share of a GPU's memory that other processes may use without a warning


@dataclass(frozen=True)
class Finding:
    """One line of the check: severity, topic, what was found, and the fix if there is a problem."""

    level: str
    topic: str
    what: str
    fix: str = ""


def check(path: str, overrides: Sequence[str] = (), machine: Machine | None = None) -> list[Finding]:
    """All findings for a run of this config on this machine."""
    machine = machine or detect()
    findings = []
    try:
        resolved = load_config(path, overrides)
        findings.append(Finding(OK, "config", f"{path}: {subject(resolved.config)}"))
    except ConfigError as error:
        findings.append(Finding(ERROR, "config", str(error)))
        resolved = None
    if resolved:
        config = resolved.config
        findings += [*data_findings(config), *model_findings(config), *token_findings(config)]
        findings += method_findings(config, machine)
        findings += disk_findings(Path(config.output.dir))
        if not exit_code(findings):
            findings += plan_findings(materialise(resolved), machine)
    return [*findings, *device_findings(machine), *version_findings(machine)]


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without errors, 3 if there are only data errors, else 2."""
    topics = {finding.topic for finding in findings if finding.level == ERROR}
    if not topics:
        return 0
    return DataError.exit_code if topics == {"data"} else ConfigError.exit_code


def findings_table(findings: Sequence[Finding]) -> Any:
    """The console output."""
    rows = []
    for finding in findings:
        name = Text.assemble((f"{finding.level:<9}", STYLES[finding.level]), finding.topic)
        fix = Text(f"\n-> {finding.fix}" if finding.fix else "", style="bold")
        rows.append((name, Text(finding.what) + fix))
    counts = Counter(finding.level for finding in findings)
    ok, warnings, errors = (counts[level] for level in (OK, WARNING, ERROR))
    summary = f"{ok} ok, {counted(warnings, 'warning')}, {counted(errors, 'error')}"
    worst = next((level for level in (ERROR, WARNING) if counts[level]), OK)
    return Group(NamedValues(rows), Text(summary, style=STYLES[worst]))


def data_findings(config: RunConfig) -> Iterator[Finding]:
    """Checks that the data exists and its first row has a known format."""
    inputs, found = data_inputs(config.data), []
    for given in inputs:
        if given.path.startswith(BUILTIN):
            yield Finding(OK, "data", f"{given.key}: {given.path} is built in")
        elif is_local(given.path) or not _is_hub_name(given.path):
            try:
                opened = open_input(given, inputs)
            except DataError as error:
                yield _unusable(given, error)
                continue
            found += opened
            yield from (_first_row(config, *pair) for pair in opened)
        else:
            yield _hub_finding("data", given.key, given.path, None, "dataset")
    for line in remark_lines(inventory(found).remarks, expected=False):
        yield Finding(WARNING, "data", line)


def _first_row(config: RunConfig, given: DataInput, source: Source) -> Finding:
    from sft_play.data.prepare import is_raw_text
    from sft_play.data.reading import read_rows
    from sft_play.rows.formats import convert, with_format

    key, path = given.key, given.path
    try:
        name, rows = with_format(read_rows(source, limit=1), given.format, f"{key}: {path}")
        row = next(rows)
        is_raw_text(config, given, source, name)
        converted = convert(row, name, config.data.system_prompt)
    except ConfigError as error:
        return Finding(ERROR, "config", str(error))
    except DataError as error:
        return _unusable(given, error)
    if isinstance(converted, str):
        what = f"{key}: {row.where}: the first row is dropped: {converted}"
        return Finding(WARNING, "data", what, f"run `{make('prepare')}` to see how many rows are dropped")
    return Finding(OK, "data", f"{key}: {path}, {name} rows")


def _unusable(given: DataInput, error: DataError) -> Finding:
    where = f"{given.key} in the config" if "[" in given.key else var(ARGS=f"{given.key}=<file>")
    fix = f"correct the file, or use another one: {where}"
    if given.alone:
        fix = f"correct the file, or use only the training rows: {given.alone}"
    return Finding(ERROR, "data", str(error), fix)


def _is_hub_name(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not name.endswith(SUFFIXES)


def model_findings(config: RunConfig) -> Iterator[Finding]:
    """Checks that a model folder is complete, or that a Hub model is reachable or cached."""
    name = config.model.name
    folder = Path(name).expanduser()
    if name.startswith(BUILTIN):
        yield Finding(OK, "model", f"model.name: {name} is built in")
    elif folder.is_dir():
        try:
            require_own_weights(config.model)
        except ConfigError as error:
            yield Finding(ERROR, "model", str(error))
        else:
            yield from _folder_findings(folder)
    elif _is_hub_name(name) or "/" not in name:
        yield _hub_finding("model", "model.name", name, config.model.revision, "model")
    else:
        fix = "use a folder or a Hub name such as Qwen/Qwen3-0.6B"
        yield Finding(ERROR, "model", f"model.name: {name} is not a folder", fix)


def _folder_findings(folder: Path) -> Iterator[Finding]:
    fix = "use a folder written by save_pretrained(), or a Hub name"
    if not (folder / "config.json").is_file():
        yield Finding(ERROR, "model", f"model.name: {folder} has no config.json", fix)
        return
    weights = sorted(folder.glob("*.safetensors"))
    missing = missing_shards(folder)
    if missing:
        what = f"model.name: {folder} lacks {', '.join(missing)}, which its index lists"
        yield Finding(ERROR, "model", what, "download it again")
    elif not weights:
        pickles = any(folder.glob("*.bin"))
        found = "only *.bin weights, which can execute code when loaded" if pickles else "no *.safetensors"
        yield Finding(ERROR, "model", f"model.name: {folder} has {found}", fix)
    if not has_tokenizer(folder):
        what = f"model.name: {folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])})"
        yield Finding(ERROR, "model", what, fix)
    elif weights and not missing:
        size = format_bytes(sum(path.stat().st_size for path in weights))
        yield Finding(OK, "model", f"model.name: {folder}, {size} of weights, tokenizer")


def token_findings(config: RunConfig) -> Iterator[Finding]:
    """The pieces of model.new_tokens, and markers of the chat template that the tokenizer splits.

    Nothing is downloaded for the template alone, and a built-in model is not made.
    """
    model = config.model
    if model.name.startswith(BUILTIN) or not (model.new_tokens or has_tokenizer(Path(model.name))):
        return
    from sft_play.data.template import split_markers, split_warning, use_template
    from sft_play.model.load import load_tokenizer, without_new_tokens
    from sft_play.model.new_tokens import add_new_tokens

    try:
        published, tokenizer = (load_tokenizer(without_new_tokens(model)) for _ in range(2))
        added = add_new_tokens(tokenizer, model.new_tokens)
        use_template(tokenizer, config.data.chat_template)
    except ConfigError as error:
        if model.new_tokens:
            yield Finding(ERROR, "tokens", str(error), "change model.new_tokens or data.chat_template")
        return
    for token in added:
        pieces = " + ".join(repr(published.decode([piece])) for piece in token.pieces)
        was = pieces or "unknown to the tokenizer"
        yield Finding(OK, "tokens", f"{token.text} is new, token {token.id}; was {was}")
    markers = split_markers(tokenizer) if config.data.task != "cpt" else []
    if markers:
        yield Finding(WARNING, "tokens", split_warning(markers), "or use another data.chat_template")


def _hub_finding(topic: str, key: str, name: str, revision: str | None, kind: str) -> Finding:
    """Looks up a model or dataset on the Hub, or in the local cache if the Hub is not reachable."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    limit_network()
    log_in = f"run: {login()}"
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        where = name.split(":")[0]
        with spinner(f"asking the Hub for {where}"):
            HfApi().repo_info(where, repo_type=kind, revision=revision, timeout=HUB_TIMEOUT_S)
        return Finding(OK, topic, f"{key}: {name} is on the Hub")
    except GatedRepoError:
        what, fix = "is gated", f"accept its license on the Hub, then {log_in}"
    except RevisionNotFoundError:
        what, fix = f"has no revision {revision}", "set model.revision to a branch, tag or commit"
    except RepositoryNotFoundError:
        what = "does not exist locally or on the Hub"
        fix = f"check the name; if it is private, {log_in}"
    except Exception as error:  # noqa: BLE001 - HTTP clients raise unrelated classes of network errors
        return _offline_finding(topic, key, name, kind, error)
    return Finding(ERROR, topic, f"{key}: {name} {what}", fix)


def _offline_finding(topic: str, key: str, name: str, kind: str, error: Exception) -> Finding:
    from huggingface_hub import try_to_load_from_cache

    marker = "config.json" if kind == "model" else "README.md"
    try:
        cached = isinstance(try_to_load_from_cache(name.split(":")[0], marker, repo_type=kind), str)
    except ValueError:
        what = f"{key}: {name} is neither a local path nor a Hub name"
        return Finding(ERROR, topic, what, "check the name")
    if cached:
        return Finding(OK, topic, f"{key}: {name} is in the local cache (the Hub is not reachable)")
    what = f"{key}: the Hub is not reachable ({first_line(error)}) and {name} is not cached"
    return Finding(ERROR, topic, what, "use a local folder, or connect to the network")


def method_findings(config: RunConfig, machine: Machine) -> Iterator[Finding]:
    """Checks that precision, quantization and engine of the config are supported here."""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
    device = Device(
        kind="cuda" if machine.gpus else "cpu",
        name=names or "the CPU",
        bf16=all(gpu.bf16 for gpu in machine.gpus),  # without a GPU: PyTorch supports bf16 on any CPU
    )
    try:
        yield Finding(OK, "method", precision_reason(config, device))
    except ConfigError as error:
        fix = "set train.mixed_precision=auto to use what the device supports"
        yield Finding(ERROR, "method", str(error), fix)
    try:
        require_possible(config, device)
    except ConfigError as error:
        yield Finding(ERROR, "method", str(error), "change one of these settings")
    for text, fix in missing(config).items():
        yield Finding(ERROR, "method", text, fix)


def plan_findings(resolved: ResolvedConfig, machine: Machine) -> Iterator[Finding]:
    """Whether the run fits this machine, and which of its rows were left out.

    It is planned on one GPU, as `make train` does, or if it needs more and may have them, on all, as
    `make plan` does; rows of the Hub are assumed.
    """
    from sft_play.planning.answers.advice import changed_command, plan_or_advise
    from sft_play.planning.planner import fastest_plan
    from sft_play.planning.request import Request
    from sft_play.planning.rows.facts import DataFacts, row_sizes
    from sft_play.sizing.facts.architecture import planning_architecture

    config, gpus, plan = resolved.config, len(machine.gpus), None
    on_hub = any(not is_local(given.path) for given in data_inputs(config.data))
    try:
        architecture, _ = planning_architecture(config.model)
        facts = DataFacts.unseen(config, architecture)
        if not on_hub:
            sizes = row_sizes(config, architecture, progress=True)
            facts = DataFacts.of_sizes(sizes, config, architecture.facts.look)
            if sizes.left_out:
                yield Finding(WARNING, "data", f"data.bad_rows=drop: {sizes.left_out}")
        with spinner(PLANNING):
            if gpus > 1 and config.parallel.engine == "auto":
                alone = Request(config, architecture, facts, with_freest(machine, 1), 1)
                with contextlib.suppress(ConfigError, DoesNotFitError):
                    plan = fastest_plan(alone, explain=False)
            request = Request(config, architecture, facts, machine, gpus or 1)
            plan = plan or plan_or_advise(request, partial(changed_command, resolved))
    except DataError as error:
        yield Finding(ERROR, "data", str(error))
    except ConfigError as error:
        yield Finding(ERROR, "plan", str(error))
    except DoesNotFitError as error:
        level, assumed = (
            (WARNING, "assuming full rows, since the data was not read, ") if on_hub else (ERROR, "")
        )
        yield Finding(level, "plan", f"{assumed}{error}")
    else:
        yield _fits(plan)


def _fits(plan: Plan) -> Finding:
    from sft_play.report.scaling import process_unit

    if plan.memory is None:
        return Finding(
            WARNING, "plan", "the memory of this run cannot be predicted", f"run `{make('probe')}`"
        )
    needed, budget = format_bytes(plan.memory.process_bytes), format_bytes(plan.memory.budget_bytes)
    where = counted(plan.sharing.world_size, process_unit(plan.device))
    return Finding(OK, "plan", f"fits {where}: {needed} per process predicted, of a budget of {budget}")


def disk_findings(output: Path) -> list[Finding]:
    """Checks that the output folder is writable and has space for checkpoints."""
    folder = existing_folder(output)
    free = free_bytes(folder)
    text = f"output.dir: {format_bytes(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        fix = f"set another folder: {var(ARGS='output.dir=<folder>')}"
        return [Finding(ERROR, "disk", f"output.dir: {folder} is not writable", fix)]
    if free >= DISK_WARNING_BYTES:
        return [Finding(OK, "disk", text)]
    fix = f"free some space, or set {var(ARGS='output.dir=<folder on a larger disk>')}"
    return [Finding(ERROR if free < DISK_ERROR_BYTES else WARNING, "disk", text, fix)]


def device_findings(machine: Machine) -> Iterator[Finding]:
    """GPUs, and other processes on them."""
    if not machine.gpus:
        what = f"training runs on the CPU: {why_left_out(machine) or machine.note}"
        larger = f"`{make('plan')}` predicts the step time of larger ones"
        yield Finding(WARNING, "device", what, f"fine for small models, such as SmolLM2-135M; {larger}")
        return
    what = f"{tallied(gpu.name for gpu in machine.gpus)}, driver {machine.driver or 'n/a'}"
    yield Finding(OK, "device", what)
    if machine.note:
        yield Finding(WARNING, "device", machine.note, "unset CUDA_VISIBLE_DEVICES if this is not intended")
    if len({gpu.name for gpu in machine.gpus}) > 1:
        what = "the GPUs are different models; the least capable one determines the plan"
        yield Finding(WARNING, "device", what, "select identical GPUs with CUDA_VISIBLE_DEVICES")
    for gpu in machine.gpus:
        used = sum(process.used_bytes or 0 for process in gpu.processes)
        if gpu.total_bytes and used > BUSY_SHARE * gpu.total_bytes:
            who = "; ".join(process_text(process) for process in gpu.processes)
            what = f"GPU {gpu.index} is in use by other processes: {who}"
            fix = "stop them, or select another GPU with CUDA_VISIBLE_DEVICES"
            yield Finding(WARNING, "device", what, fix)


def version_findings(machine: Machine) -> Iterator[Finding]:
    """Checks installed packages against pyproject.toml, and that torch can use the GPU."""
    from packaging.requirements import Requirement

    wrong, seen = [], {}
    for requirement in map(Requirement, importlib.metadata.requires("sft-play") or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        seen[requirement.name] = found
        if found == "not installed" or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} (needs {requirement.specifier})")
    if wrong:
        yield Finding(ERROR, "versions", "; ".join(wrong), f"run `{make('install')}`")
    else:
        main = [name for name in ("torch", "transformers", "trl", "accelerate") if name in seen]
        versions = ", ".join(f"{name} {seen[name]}" for name in main)
        yield Finding(OK, "versions", f"{len(seen)} packages have supported versions: {versions}")
    if problem := why_unusable(machine):
        yield Finding(ERROR, "versions", *problem)
