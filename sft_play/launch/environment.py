"""What a launcher tells each process through environment variables, which are read only here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ConfigError

COMPANIONS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set together with WORLD_SIZE
PLAN_VARIABLE = "SFT_PLAY_PLAN"  # file of the plan that our launcher made for its ranks
REPORTS_VARIABLE = "SFT_PLAY_RANKS"  # folder where the ranks report to our launcher how they ended
PROCESSES_VARIABLE = "SFT_PLAY_PROCESSES"  # world size that our launcher requested


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place among those of a run; the default is a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    plan_file: Path | None = None
    reports_folder: Path | None = None
    asked_world_size: int | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    @property
    def launched_by_us(self) -> bool:
        """Whether our launcher started this process.

        If so, the launcher holds the run directory, made the plan and prints the summary.
        """
        return self.plan_file is not None

    @property
    def spans_machines(self) -> bool:
        """Whether processes of the run are on other machines."""
        return self.world_size != self.local_world_size

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "RankEnvironment":
        """Reads the variables that torchrun and accelerate set, and ours.

        Raises:
            ConfigError: WORLD_SIZE is not a number, or its companions are missing.
        """
        text = environment.get("WORLD_SIZE", "1")
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(
                f"WORLD_SIZE={text}: expected a whole number above 0, as torchrun and accelerate set it"
            )
        world_size = int(text)
        missing = [name for name in COMPANIONS if not environment.get(name)] if world_size > 1 else []
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={text}, but {', '.join(missing)} not set: start all processes with torchrun or "
                "`make train-distributed`, or unset WORLD_SIZE to train with one"
            )
        plan, reports = environment.get(PLAN_VARIABLE), environment.get(REPORTS_VARIABLE)
        asked = environment.get(PROCESSES_VARIABLE)
        return cls(
            rank=int(environment.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", text)),
            plan_file=Path(plan) if plan else None,
            reports_folder=Path(reports) if reports else None,
            asked_world_size=int(asked) if asked else None,
        )

    def require_whole_world(self) -> None:
        """Checks that as many processes were started as our launcher requested.

        Raises:
            ConfigError: accelerate started fewer or more.
        """
        if self.asked_world_size not in (None, self.world_size):
            raise ConfigError(
                f"{self.asked_world_size} processes were requested, but the launcher started "
                f"{self.world_size}; the effective batch would be wrong. Check the accelerate config file "
                "(on a CPU it needs distributed_type: MULTI_GPU with use_cpu: true)"
            )


SINGLE_PROCESS = RankEnvironment()
