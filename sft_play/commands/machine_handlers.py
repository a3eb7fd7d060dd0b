"""The commands about this machine."""

import json
import sys
from dataclasses import asdict

from sft_play.commands.command_line import Arguments, command, end, importing, switch
from sft_play.machine import gpus
from sft_play.ui.console import console


@command("gpu-info", config=False, as_json=True, prints=True)
def gpu_info(args: Arguments) -> int:
    """Show GPUs, CPU and RAM of this machine."""
    from sft_play.report.machine import gpu_info_table

    machine = gpus.detect()
    return end(args, gpus.to_json(machine), gpu_info_table(machine))


@command("memory-check", config=False, as_json=True, prints=True)
def memory_check(args: Arguments) -> int:
    """Show the memory that is available to a run."""
    from sft_play.report.machine import memory_table

    machine = gpus.detect()
    table = memory_table(machine, gpus.left_per_process(machine))
    return end(args, gpus.memory_report(machine), table)


@command("device-profile", config=False, as_json=True, prints=True)
@switch("--again", "measure again")
def device_profile(args: Arguments, again: bool) -> int:
    """Show how fast operations are on this device; measures them the first time."""
    from sft_play.report.profile import profile_report

    with importing():
        from sft_play.planning.speed.devices import checked, device_name, read_collectives, saved_profile
    machine = gpus.detect()
    tree = json.loads(checked(saved_profile(machine, 1, again=again), machine).to_json())
    measured = read_collectives(device_name(machine))
    tree["collectives"] = {str(count): asdict(found) for count, found in measured.items()}
    return end(args, tree, profile_report(tree))


@command("setup-accelerate", config=False)
@switch("--auto", "write the config without asking questions")
def setup_accelerate(args: Arguments, auto: bool) -> int:
    """Write accelerate's default config, with its wizard or for this machine (--auto)."""
    from sft_play.launch.accelerate_config import setup_accelerate as setup

    return setup(auto)


@command("config-schema", config=False, prints=True)
def config_schema(args: Arguments) -> int:
    """Print the JSON schema of config files."""
    from sft_play.config.load import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
    return 0


@command("clean-cache", config=False)
def clean_cache(args: Arguments) -> int:
    """Remove caches: tokenized rows, traces, measurements, built-in models."""
    from sft_play.cache import cache_dir, clear, project_dir
    from sft_play.units import format_bytes

    for folder in dict.fromkeys((project_dir(), cache_dir())):
        console().print(f"removed     {format_bytes(clear(folder))} from {folder}")
    return 0
