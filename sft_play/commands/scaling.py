"""A run on other numbers of processes: planned when its report is asked for, since training must not wait."""

from dataclasses import replace

from sft_play.builtin.demo import materialise
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.machine.gpus import Machine, detect
from sft_play.plan import Plan
from sft_play.planning.answers.other_machines import scaling
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts, row_sizes
from sft_play.runlog import RunDir, read_json
from sft_play.sizing.facts.architecture import planning_architecture
from sft_play.ui.console import warn
from sft_play.ui.progress import PLANNING, spinner


def add_scaling(run: RunDir) -> None:
    """Writes scaling.json into the directory of a finished run.

    Whatever fails here is said in one line: its report does without.
    """
    try:
        machine = _its_machine(run)
        plan, config = Plan.from_json(read_json(run.plan)), materialise(load_config(run.config)).config
        architecture, _ = planning_architecture(config.model)
        with spinner(PLANNING):
            sizes = row_sizes(config, architecture, progress=False)
            facts = DataFacts.of_sizes(sizes, config, architecture.facts.look)
            shared = plan.sharing
            request = Request(config, architecture, facts, machine, shared.world_size)
            rows = scaling(request.with_offload(shared.offload).in_groups_as(shared))
        run.write_json(run.scaling, {"scaling": rows})
    except Exception as error:  # noqa: BLE001 - see above
        warn(f"no plans for other numbers of processes: {error}")


def _its_machine(run: RunDir) -> Machine:
    """This machine, with the GPUs of the kinds that the run was trained on.

    Raises ConfigError if it has others, or none.
    """
    machine, recorded = detect(), read_json(run.environment)
    trained_on = {gpu["name"] for gpu in recorded.get("gpus") or ()} or {recorded.get("cpu")}
    here: set[str | None] = {gpu.name for gpu in machine.gpus} or {machine.host.cpu_model}
    if not trained_on <= here:
        there, found = (", ".join(sorted(map(str, names))) for names in (trained_on, here))
        raise ConfigError(f"the run was trained on {there}; this machine has {found}")
    return replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.name in trained_on))
