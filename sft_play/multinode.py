"""Joins several machines into one run: they connect, agree on a plan, and start and end together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sft_play.errors import ConfigError, Interrupted, SftPlayError
from sft_play.job import Job, agreed_plan, job_digest
from sft_play.launch.link import Link, connect
from sft_play.launch.nodes import Nodes
from sft_play.launch.ports import free_port
from sft_play.launch.ranks import RankExit


@contextmanager
def connected_machines(nodes: Nodes) -> Iterator[Link | None]:
    """The connection to the other machines, which are told if the block fails; None if there are none.

    Raises:
        LaunchError: a machine did not join.
        ConfigError: they were started with contradictory settings.
    """
    if nodes.count == 1:
        yield None
        return
    link = connect(nodes)
    done = False
    try:
        yield link
        link.wait_for_main()
        done = True
    except Interrupted:
        link.wait_for_main()  # it may still be writing the checkpoint
        done = True
        raise
    except BaseException as error:
        link.report_failure(
            RankExit(
                0,
                error.exit_code if isinstance(error, SftPlayError) else 1,
                str(error) or type(error).__name__,
            )
        )
        raise
    finally:
        link.close(done=done)


def agree_on_plan(job: Job, link: Link) -> tuple[Job, Nodes]:
    """The job with the plan that all machines agreed on, and their ranks with the port to connect to.

    Raises:
        ConfigError: they have different numbers of processes.
        LaunchError: they have different settings, data or kinds of devices.
        SftPlayError: another machine failed before.
    """
    offer = {
        "given": job_digest(job),
        "plan": job.plan.to_json(),
        "processes": job.plan.world_size // link.nodes.count,
    }
    decision = link.agree(offer, _decide)
    return replace(job, plan=agreed_plan([decision["offer"]])), replace(
        link.nodes, main_port=decision["port"]
    )


def _decide(offers: list[dict[str, Any]]) -> dict[str, Any]:
    if len({offer["processes"] for offer in offers}) > 1:
        found = ", ".join(
            f"{offer['processes']} on machine {offer['node']} ({offer['host']})" for offer in offers
        )
        raise ConfigError(
            f"all machines need the same number of processes, found {found}: set NGPU=<n> on all of them"
        )
    plan = agreed_plan([(offer["given"], offer["plan"]) for offer in offers])
    return {"offer": [offers[0]["given"], plan.to_json()], "port": free_port(host="")}
