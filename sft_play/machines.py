"""Several machines become one run: they meet, agree on a plan, are launched side by side, and end together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sft_play.errors import ConfigError, Interrupted, SftPlayError
from sft_play.job import Job, agreed_plan, fingerprint
from sft_play.launch.link import Link, connect
from sft_play.launch.nodes import Nodes
from sft_play.launch.ports import free_port
from sft_play.launch.ranks import RankExit


@contextmanager
def met(nodes: Nodes) -> Iterator[Link | None]:
    """The connection to the other machines while the block runs, which they learn of if it fails; None if there are none.

    Raises:
        LaunchError: a machine did not come.
        ConfigError: they were started with numbers that do not go together.
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
        link.tell(RankExit(0, error.exit_code if isinstance(error, SftPlayError) else 1, str(error) or type(error).__name__))
        raise
    finally:
        link.close(done=done)


def agree(job: Job, link: Link) -> tuple[Job, Nodes]:
    """The job with the plan that all machines have, and the port that their ranks meet on.

    Raises:
        ConfigError: they have different numbers of processes.
        LaunchError: they have different settings, data or kinds of devices.
        SftPlayError: another machine failed on its way here.
    """
    offer = {"given": fingerprint(job), "plan": job.plan.to_json(), "processes": job.plan.world_size // link.nodes.count}
    decision = link.agree(offer, _decide)
    return replace(job, plan=agreed_plan([decision["offer"]])), replace(link.nodes, main_port=decision["port"])


def _decide(offers: list[dict[str, Any]]) -> dict[str, Any]:
    if len({offer["processes"] for offer in offers}) > 1:
        found = ", ".join(f"{offer['processes']} on machine {offer['node']} ({offer['host']})" for offer in offers)
        raise ConfigError(f"every machine takes as many processes as the others, found {found}: say NGPU=<n> on all")
    plan = agreed_plan([(offer["given"], offer["plan"]) for offer in offers])
    return {"offer": [offers[0]["given"], plan.to_json()], "port": free_port(host="")}
