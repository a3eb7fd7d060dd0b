"""Joins several machines into one run: they connect, agree on a plan, and start and end together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sft_play.errors import ConfigError, Interrupted, SftPlayError
from sft_play.job import Job, agreed_plan, job_digest
from sft_play.launch.link import Link
from sft_play.launch.nodes import Nodes, address_towards, free_port
from sft_play.launch.ranks import RankExit
from sft_play.plan import Plan
from sft_play.spelling import var


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
    link = Link(nodes)
    try:
        link.join()
        yield link
        link.wait_for_main()
    except Interrupted:
        link.wait_for_main()  # it may still be writing the checkpoint
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, SftPlayError) else 1
        link.report_failure(RankExit(0, code, str(error) or type(error).__name__))
        raise
    finally:
        link.close()


def agree_on_plan(job: Job, link: Link) -> tuple[Job, Nodes]:
    """The job with the plan that all machines agreed on, and their ranks with the port to connect to.

    Raises:
        ConfigError: they have different numbers of processes.
        LaunchError: they have different settings, data or kinds of devices.
        SftPlayError: another machine failed before.
    """
    offer = {"digest": job_digest(job), "plan": job.plan.to_json()}
    decision = link.agree({**offer, "address": address_towards(link.nodes.main_address)}, _decide)
    peer = None if link.nodes.rank else decision["peer"]
    nodes = replace(link.nodes, main_port=decision["port"], peer=peer)
    return replace(job, plan=Plan.from_json(decision["plan"])), nodes


def _decide(offers: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [offer["plan"]["plan"]["world_size"] // len(offers) for offer in offers]
    if len(set(counts)) > 1:
        found = ", ".join(
            f"{count} on machine {offer['node']} ({offer['host']})"
            for count, offer in zip(counts, offers, strict=True)
        )
        raise ConfigError(
            f"all machines need the same number of processes, found {found}: set "
            f"{var(NGPU='<n>')} on all of them"
        )
    plan = agreed_plan([(offer["digest"], offer["plan"]) for offer in offers])
    return {"plan": plan.to_json(), "port": free_port(host=""), "peer": offers[1]["address"]}
