"""One process and all engines give the same curve and resume from each other's checkpoints.

fp32, no dropout, effective batch 12: 2 x 6, 2 x 3 x 2, 2 x 2 x 3 or 1 x 3 x 4. Launches on two processes, then on
three and four, which resume from what the others saved. Of these, test_two_processes.py has one launch.
"""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sft_play.errors import CheckpointError
from sft_play.manifest import MANIFEST
from sft_play.runlog import RunDir, read_metrics
from sft_play.train.run import train
from tests.conftest import token_rows
from tests.integration.processes import CLOSE, assert_same_curve, launch_jobs
from tests.jobs import SEQ, make_job, seal, tied_copy
from tests.unit.test_manifest import flip_bit

pytestmark = [pytest.mark.integration, pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

STEPS, SAVED = 4, 2
COMMON = {
    "max_steps": STEPS, "save_steps": SAVED, "eval_steps": SAVED, "effective_batch_size": 12, "batch_size": 2,
    "weight_decay": 0.1,  # so that the optimizer has two groups of parameters, with and without
}  # fmt: skip
PACKED = {"packing": True, "effective_batch_size": 12 * SEQ, "batch_size": 2 * SEQ}
KINDS = {
    "lora-padded": {"mode": "lora", "probe": True},
    "lora-packed": {"mode": "lora", **PACKED},
    "full-padded": {"mode": "full", "learning_rate": 1e-3, "padding_free": False},
    "full-packed": {"mode": "full", "learning_rate": 1e-3, "probe": True, **PACKED},
}
# Of the engines' kinds, those of `make test-all`; the others, and more of what resumes, are of `make test-faults`.
ALWAYS = {
    "zero2": ("lora-padded",),
    "ddp": ("lora-padded",),
    "fsdp2": ("full-padded",),
    "zero3": ("lora-padded",),
}
# A rate with which the first step makes it better and the second one worse: the run ends, and keeps the first.
STOPPING = {
    "mode": "lora", "learning_rate": 0.02, "lr_schedule": "constant", "warmup_ratio": 0.0,
    "early_stopping_patience": 1, "eval_steps": 1, "save_steps": 1,
}  # fmt: skip
CLIPPED = {**KINDS["lora-padded"], "max_grad_norm": 0.1}  # every step is: norms are 0.2 to 0.35
TIED = {"mode": "full", "max_steps": 2, "save_steps": 2, "eval_steps": 2}
MIXED = {"gradient_checkpointing": True, "kept_layers": 1}  # one of the two layers is recomputed
TILED = {"gradient_checkpointing": True, "mlp_tiles": 3}
EPOCH_ROWS = 31  # no batch divides them


def kinds_of(engine: str, *, always: bool) -> dict[str, dict]:
    """Jobs of an engine by name, a kind each."""
    chosen = [kind for kind in KINDS if (kind in ALWAYS[engine]) == always]
    return {f"{engine}-{kind}": KINDS[kind] for kind in chosen}


def with_engine(engine: str, jobs: dict[str, dict]) -> dict[str, dict]:
    """Jobs in a launch of another engine whose ranks start in the same way: a launch costs more than they do."""
    return {name: {"engine": engine, **settings} for name, settings in jobs.items()}


def resumed(folder: Path, source: str, engine: str, kind: str, **settings) -> dict[str, dict]:
    """A job by name that goes on from what another engine saved."""
    job = {**KINDS[kind], **settings, "resume": saved_by(folder, f"{source}-{kind}")}
    return {f"{source}-to-{engine}-{kind}": job}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def tied_model(tiny_model, folder) -> Path:
    return tied_copy(tiny_model, folder / "tied-model")


def saved_by(folder: Path, name: str) -> str:
    return str(folder / name / "checkpoints" / f"checkpoint-{SAVED}")


@pytest.fixture(scope="module")
def launch(tiny_model, folder):
    """Runs jobs on several processes, all in one launch, with its engine or with their own."""

    def run(engine: str, processes: int, jobs: dict[str, dict], *, forked: bool = True) -> None:
        specs = [
            {
                "model": str(settings.pop("model", tiny_model)),
                "name": name,
                "only_look": settings.pop("only_look", False),
                "settings": {**COMMON, **settings},
            }
            for name, settings in jobs.items()
        ]
        launch_jobs(folder, engine, processes, specs, forked=forked)

    return run


@pytest.fixture(scope="module")
def one(tiny_model, folder):
    """The curves of one process, by kind, but for the kind that none of the engines has in ALWAYS."""
    kinds = {kind: KINDS[kind] for kind in ("lora-padded", "lora-packed", "full-padded")}
    for kind, settings in (kinds | {"stopping": STOPPING, "clipped": CLIPPED}).items():
        train(make_job(tiny_model, folder, f"one-{kind}", **{**COMMON, **settings}))
    return folder


@pytest.fixture(scope="module")
def zero2(one, launch, tied_model, folder):
    """ZeRO-2 on two processes, what resumes from one process and, in the same launch, ZeRO-3."""
    jobs = kinds_of("zero2", always=True) | resumed(folder, "one", "zero2", "lora-padded")
    jobs["best-before"] = {"mode": "lora", "resume": str(checkpoint_that_stays_best(folder))}
    others = kinds_of("zero3", always=True) | {
        "zero3-clipped": CLIPPED,
        "zero3-tied": TIED | {"model": tied_model},
    }
    launch("deepspeed_z2", 2, jobs | with_engine("deepspeed_z3", others), forked=False)
    return folder


@pytest.fixture(scope="module")
def zero2_more(zero2, launch, tiny_model, folder):
    """The other kinds, of one process too."""
    train(make_job(tiny_model, folder, "one-full-packed", **{**COMMON, **KINDS["full-packed"]}))
    jobs = kinds_of("zero2", always=False) | resumed(folder, "one", "zero2", "full-padded")
    launch("deepspeed_z2", 2, jobs)
    return folder


def checkpoint_that_stays_best(folder: Path) -> Path:
    """The one of one process, with a validation loss that no later one can have."""
    copy = folder / "best" / f"checkpoint-{SAVED}"
    if copy.exists():
        return copy
    shutil.copytree(saved_by(folder, "one-lora-padded"), copy)
    state = json.loads((copy / "trainer_state.json").read_text())
    state |= {"best_metric": -1.0, "best_model_checkpoint": str(copy), "best_global_step": SAVED}
    (copy / "trainer_state.json").write_text(json.dumps(state))
    seal(copy)
    return copy


def jobs_of_ddp(folder: Path) -> dict[str, dict]:
    """Some resume from the others, and one has the rows of each rank."""
    jobs = kinds_of("ddp", always=True) | resumed(folder, "fsdp2", "ddp", "full-padded")
    jobs["ddp-tiled-lora-packed"] = {**KINDS["lora-packed"], **TILED}
    jobs["looked"] = {"only_look": True, "rows": token_rows(EPOCH_ROWS, seed=5), "max_steps": 3}
    return jobs


@pytest.fixture(scope="module")
def ddp(fsdp2):
    """DDP on two processes, in the launch of FSDP2."""
    return fsdp2


@pytest.fixture(scope="module")
def ddp_more(ddp, zero2_more, fsdp2_more, launch, folder):
    """The other kinds, and what resumes from them."""
    jobs = kinds_of("ddp", always=False) | resumed(folder, "one", "ddp", "full-padded")
    jobs |= resumed(folder, "zero2", "ddp", "lora-padded") | resumed(folder, "zero2", "ddp", "full-padded")
    jobs |= resumed(folder, "fsdp2", "ddp", "lora-padded")
    jobs["ddp-recomputed-full-padded"] = {**KINDS["full-padded"], "gradient_checkpointing": True}
    jobs["ddp-recomputed-lora-padded"] = {**KINDS["lora-padded"], **MIXED}
    launch("ddp", 2, jobs)
    return folder


@pytest.fixture(scope="module")
def fsdp2(zero2, launch, tied_model, folder):
    """FSDP2 on two processes, in other ways too, what resumes from ZeRO-2 and, in the same launch, DDP."""
    jobs = kinds_of("fsdp2", always=True) | resumed(folder, "zero2", "fsdp2", "lora-padded")
    jobs["fsdp2-tiled-full-padded"] = {**KINDS["full-padded"], **TILED}
    jobs["fsdp2-deferring-full-padded"] = {**KINDS["full-padded"], "defers_exchange": True}
    jobs["fsdp2-gathered-full-padded"] = {**KINDS["full-padded"], "reshard_after_forward": False}
    jobs |= {"fsdp2-stopping": STOPPING, "fsdp2-clipped": CLIPPED, "fsdp2-tied": TIED | {"model": tied_model}}
    jobs["fsdp2-best-before"] = {"mode": "lora", "resume": str(checkpoint_that_stays_best(folder))}
    launch("fsdp2", 2, jobs | with_engine("ddp", jobs_of_ddp(folder)))
    return folder


@pytest.fixture(scope="module")
def fsdp2_more(fsdp2, zero2_more, launch, folder):
    """The other kinds and ways."""
    jobs = kinds_of("fsdp2", always=False) | resumed(folder, "zero2", "fsdp2", "full-padded")
    jobs["fsdp2-recomputed-lora-padded"] = {**KINDS["lora-padded"], "gradient_checkpointing": True}
    jobs["fsdp2-recomputed-full-padded"] = {**KINDS["full-padded"], **MIXED}
    jobs["fsdp2-deferring-lora-packed"] = {**KINDS["lora-packed"], "defers_exchange": True}
    gathered = {"reshard_after_forward": False, "defers_exchange": True, **MIXED}
    jobs["fsdp2-gathered-lora-packed"] = {**KINDS["lora-packed"], **gathered}
    launch("fsdp2", 2, jobs)
    return folder


@pytest.fixture(scope="module")
def zero3(zero2):
    """ZeRO-3 on two processes, in the launch of ZeRO-2."""
    return zero2


@pytest.fixture(scope="module")
def zero3_more(zero3, zero2_more, fsdp2_more, launch, folder):
    """The other kinds, recomputed too, and what resumes from every other engine and from itself."""
    jobs = kinds_of("zero3", always=False)
    for kind, engine in product(("lora-padded", "full-padded"), ("one", "zero2", "fsdp2", "zero3")):
        jobs |= resumed(folder, engine, "zero3", kind)
    for kind in ("lora-padded", "full-padded"):
        jobs[f"zero3-recomputed-{kind}"] = {**KINDS[kind], **MIXED}
    jobs["zero3-tiled-full-packed"] = {**KINDS["full-packed"], **TILED}
    jobs["zero3-stopping"] = STOPPING
    jobs["zero3-best-before"] = {"mode": "lora", "resume": str(checkpoint_that_stays_best(folder))}
    launch("deepspeed_z3", 2, jobs)
    return folder


@pytest.fixture(scope="module")
def from_zero3(zero3_more, launch, folder):
    """Every other engine on two processes, and ZeRO-3 on three, resuming from ZeRO-3."""
    for name, engine, processes in (
        ("ddp", "ddp", 2), ("zero2", "deepspeed_z2", 2), ("fsdp2", "fsdp2", 2), ("three", "deepspeed_z3", 3),
    ):  # fmt: skip
        jobs = {}
        for kind in ("lora-padded", "full-padded"):
            jobs |= resumed(folder, "zero3", name, kind)
        launch(engine, processes, jobs)
    return folder


@pytest.fixture(scope="module")
def four(fsdp2_more, launch, folder):
    """FSDP2 on four processes, from the start and from two; some have no part of a small weight."""
    jobs = {f"four-{kind}": KINDS[kind] | {"batch_size": 3} for kind in ("lora-padded", "full-padded")}
    jobs |= resumed(folder, "fsdp2", "four", "lora-packed", batch_size=3 * SEQ)
    jobs |= resumed(folder, "fsdp2", "four", "full-padded", batch_size=3)
    launch("fsdp2", 4, jobs)
    return folder


@pytest.fixture(scope="module")
def zero3_four(zero3_more, launch, folder):
    """ZeRO-3 on four processes, from the start and from two."""
    jobs = {f"zero3-four-{kind}": KINDS[kind] | {"batch_size": 3} for kind in ("lora-padded", "full-padded")}
    jobs |= resumed(folder, "zero3", "four3", "lora-padded", batch_size=3)
    jobs |= resumed(folder, "zero3", "four3", "full-padded", batch_size=3)
    launch("deepspeed_z3", 4, jobs)
    return folder


@pytest.fixture(scope="module")
def back(fsdp2_more, launch, folder):
    """ZeRO-2 on two processes, resuming from FSDP2."""
    jobs = resumed(folder, "fsdp2", "zero2", "lora-padded") | resumed(folder, "fsdp2", "zero2", "full-padded")
    launch("deepspeed_z2", 2, jobs)
    return folder


@pytest.fixture(scope="module")
def three(zero2_more, launch, folder):
    """ZeRO-2 on three processes, resuming from two; its partitions are filled up at the end."""
    jobs = {"three-full-padded": KINDS["full-padded"]}
    jobs |= resumed(folder, "zero2", "three", "lora-packed") | resumed(
        folder, "zero2", "three", "full-padded"
    )
    launch("deepspeed_z2", 3, jobs)
    return folder


def assert_same_as_one(folder: Path, name: str, kind: str, after: int = 0) -> None:
    """Every loss, gradient norm and learning rate of a run is that of one process, from step `after` on."""
    assert_same_curve(folder / name, folder / f"one-{kind}", CLOSE, after)
    assert read_metrics(RunDir(folder / name))[-1]["step"] == STEPS


def slow(*values: str) -> Any:
    """A case of `make test-faults`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("launched", "engine", "kind"),
    [
        (engine, engine, kind) if kind in always else slow(f"{engine}_more", engine, kind)
        for engine, always in ALWAYS.items()
        for kind in KINDS
    ],
)
def test_two_processes_learn_what_one_does(request, launched, engine, kind):
    assert_same_as_one(request.getfixturevalue(launched), f"{engine}-{kind}", kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora-padded", "full-padded"])
def test_zero3_goes_on_from_its_own_checkpoint_bit_for_bit(zero3_more, kind):
    exactly = dict.fromkeys(CLOSE, 0.0)
    assert_same_curve(
        zero3_more / f"zero3-to-zero3-{kind}", zero3_more / f"zero3-{kind}", exactly, after=SAVED
    )
    name = "adapter/adapter_model.safetensors" if "lora" in kind else "model/model.safetensors"
    found, expected = (
        load_file(zero3_more / run / name) for run in (f"zero3-to-zero3-{kind}", f"zero3-{kind}")
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize(
    ("launched", "name", "kind"),
    [
        ("zero2", "one-to-zero2", "lora-padded"), slow("zero2_more", "one-to-zero2", "full-padded"),
        slow("ddp_more", "zero2-to-ddp", "full-padded"), slow("ddp_more", "zero2-to-ddp", "lora-padded"),
        ("ddp", "fsdp2-to-ddp", "full-padded"), slow("ddp_more", "fsdp2-to-ddp", "lora-padded"),
        slow("ddp_more", "one-to-ddp", "full-padded"),
        ("fsdp2", "zero2-to-fsdp2", "lora-padded"), slow("fsdp2_more", "zero2-to-fsdp2", "full-padded"),
        *(
            slow("zero3_more", f"{engine}-to-zero3", kind)
            for engine, kind in product(("one", "zero2", "fsdp2"), ("lora-padded", "full-padded"))
        ),
        *(
            slow("from_zero3", f"zero3-to-{engine}", kind)
            for engine, kind in product(("ddp", "zero2", "fsdp2", "three"), ("lora-padded", "full-padded"))
        ),
        slow("zero3_four", "zero3-to-four3", "lora-padded"), slow("zero3_four", "zero3-to-four3", "full-padded"),
        slow("back", "fsdp2-to-zero2", "lora-padded"), slow("back", "fsdp2-to-zero2", "full-padded"),
        slow("four", "fsdp2-to-four", "lora-packed"), slow("four", "fsdp2-to-four", "full-padded"),
        slow("three", "zero2-to-three", "lora-packed"), slow("three", "zero2-to-three", "full-padded"),
    ],
)  # fmt: skip
def test_a_checkpoint_goes_on_as_if_nothing_had_changed(request, launched, name, kind):
    assert_same_as_one(request.getfixturevalue(launched), f"{name}-{kind}", kind, after=SAVED)


@pytest.mark.parametrize(
    ("launched", "engine", "kind"),
    [
        slow("zero2_more", "zero2", "lora-packed"),
        ("zero2", "zero2", "lora-padded"),
        slow("zero2_more", "zero2", "full-padded"),
        ("ddp", "ddp", "lora-padded"),
        slow("fsdp2_more", "fsdp2", "lora-packed"),
        ("fsdp2", "fsdp2", "full-padded"),
        ("zero3", "zero3", "lora-padded"),
        slow("zero3_more", "zero3", "full-packed"),
        slow("four", "four", "full-padded"),
        slow("zero3_four", "zero3-four", "full-padded"),
        slow("three", "three", "full-padded"),
    ],
)
def test_many_processes_go_on_as_one(request, tiny_model, launched, engine, kind):
    folder = request.getfixturevalue(launched)
    source = Path(saved_by(folder, f"{engine}-{kind}"))
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    train(
        make_job(
            tiny_model,
            folder,
            f"{engine}-to-one-{kind}",
            **{**COMMON, **KINDS[kind], "resume": str(source)},
        )
    )
    assert_same_as_one(folder, f"{engine}-to-one-{kind}", kind, after=SAVED)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("launched", "engine", "kind"),
    [
        slow("fsdp2_more", "fsdp2", "lora-padded"),
        slow("fsdp2_more", "fsdp2", "full-padded"),
        slow("zero3_more", "zero3", "lora-padded"),
        slow("zero3_more", "zero3", "full-padded"),
        slow("ddp_more", "ddp", "full-padded"),
        slow("ddp_more", "ddp", "lora-padded"),
    ],
)
def test_recomputing_among_processes_changes_nothing(request, launched, engine, kind):
    """So do MLPs in tiles, which recompute layers too, in `make test`."""
    assert_same_as_one(request.getfixturevalue(launched), f"{engine}-recomputed-{kind}", kind)


@pytest.mark.parametrize(
    ("launched", "engine", "kind"),
    [
        ("fsdp2", "fsdp2", "full-padded"),
        ("ddp", "ddp", "lora-packed"),
        slow("zero3_more", "zero3", "full-packed"),
    ],
)
def test_mlps_in_tiles_learn_the_same(request, launched, engine, kind):
    assert_same_as_one(request.getfixturevalue(launched), f"{engine}-tiled-{kind}", kind)


@pytest.mark.parametrize(("launched", "kind"), [("fsdp2", "full-padded"), slow("fsdp2_more", "lora-packed")])
def test_gradients_may_wait_for_the_last_micro_batch(request, launched, kind):
    assert_same_as_one(request.getfixturevalue(launched), f"fsdp2-deferring-{kind}", kind)


def test_weights_that_stay_gathered_learn_the_same_bit_for_bit(fsdp2):
    """Each step accumulates, and an evaluation is between steps, after which they are divided again."""
    runs = fsdp2 / "fsdp2-gathered-full-padded", fsdp2 / "fsdp2-full-padded"
    assert_same_curve(*runs, dict.fromkeys(CLOSE, 0.0))
    found, expected = (load_file(run / "model/model.safetensors") for run in runs)
    assert all(torch.equal(found[key], expected[key]) for key in expected | found)


@pytest.mark.slow
def test_weights_stay_gathered_with_layers_recomputed_and_gradients_that_wait(fsdp2_more):
    assert_same_as_one(fsdp2_more, "fsdp2-gathered-lora-packed", "lora-packed")


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["four", "zero3_four"])
@pytest.mark.parametrize("kind", ["lora-padded", "full-padded"])
def test_four_processes_learn_what_one_does(request, launched, kind):
    assert_same_as_one(request.getfixturevalue(launched), f"{launched.replace('_', '-')}-{kind}", kind)


@pytest.mark.parametrize(
    ("launched", "name"), [("fsdp2", "fsdp2-stopping"), slow("zero3_more", "zero3-stopping")]
)
def test_a_run_that_gets_worse_ends_as_early_as_one_process_and_keeps_the_same_weights(
    request, launched, name
):
    folder = request.getfixturevalue(launched)
    last, alone = (read_metrics(RunDir(folder / run))[-1]["step"] for run in (name, "one-stopping"))
    assert last == alone < STEPS
    found, expected = (
        load_file(folder / run / "adapter" / "adapter_model.safetensors") for run in (name, "one-stopping")
    )
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.any(), key  # trained: B is zero before the first step
        assert torch.allclose(tensor, expected[key], rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_gradients_of_divided_weights_are_clipped_by_the_norm_of_all(request, engine):
    folder = request.getfixturevalue(engine)
    assert_same_as_one(folder, f"{engine}-clipped", "clipped")
    with pytest.raises(AssertionError):
        assert_same_as_one(folder, f"{engine}-clipped", "lora-padded")  # which is not clipped


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_tied_weights_that_were_divided_are_saved_once_and_load_in_transformers(request, tied_model, engine):
    run = request.getfixturevalue(engine) / f"{engine}-tied"
    expected = load_file(tied_model / "model.safetensors")
    saved, kept = (
        load_file(folder / "model.safetensors")
        for folder in (run / "model", run / "checkpoints" / "checkpoint-2")
    )
    assert "lm_head.weight" not in expected
    assert saved.keys() == kept.keys() == expected.keys()
    assert all(torch.equal(saved[name], kept[name]) for name in saved)
    loaded = AutoModelForCausalLM.from_pretrained(run / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, saved[name]) and not torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("zero2", "best-before"),
        ("fsdp2", "fsdp2-best-before"),
        slow("zero3_more", "zero3-best-before"),
    ],
)
def test_the_best_checkpoint_may_be_from_before_the_move(request, engine, name):
    folder = request.getfixturevalue(engine)
    kept = load_file(folder / name / "adapter" / "adapter_model.safetensors")
    best = load_file(folder / "best" / f"checkpoint-{SAVED}" / "adapter_model.safetensors")
    later = load_file(folder / name / "checkpoints" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert kept.keys() == best.keys() and all(torch.equal(kept[name], best[name]) for name in best)
    assert any(not torch.equal(best[name], later[name]) for name in best)


@pytest.mark.parametrize(
    ("damage", "said"),
    [("remove", "1 of 2 optimizer state files"), ("cut", "optim_states.pt cannot be read")],
)
def test_a_damaged_part_of_a_checkpoint_without_a_manifest_stops_the_run(
    zero2, tiny_model, tmp_path, damage, said
):
    copy = tmp_path / f"checkpoint-{SAVED}"
    shutil.copytree(saved_by(zero2, "zero2-lora-padded"), copy)
    (copy / MANIFEST).unlink()
    (part,) = copy.glob("global_step*/zero_pp_rank_1_*")
    part.unlink() if damage == "remove" else part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=said):
        train(make_job(tiny_model, tmp_path, "damaged", **{**COMMON, "mode": "lora", "resume": str(copy)}))


@pytest.mark.faults
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "of another step"])
def test_a_damaged_shard_costs_its_checkpoint_alone(request, tiny_model, tmp_path, capsys, damage, engine):
    """And the run goes on from the one before it, here on one process."""
    folder = request.getfixturevalue(f"{engine}_more")
    shutil.copytree(
        folder / f"{engine}-lora-padded", tmp_path / "run", ignore=shutil.ignore_patterns("adapter")
    )
    earlier, later = (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" for step in (SAVED, STEPS))
    shard = later / "optimizer_shard_1.safetensors"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        flip_bit(shard, len(content) // 2)
    else:
        shutil.copy(earlier / shard.name, shard)
    train(make_job(tiny_model, tmp_path, "run", **{**COMMON, **KINDS["lora-padded"], "resume": "auto"}))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{later.name} is damaged: {shard.name}" in said and f"resuming from {earlier}" in said
    assert later.with_name(f"{later.name}.damaged").is_dir()
    assert_same_curve(tmp_path / "run", folder / "one-lora-padded", CLOSE, SAVED)


def test_only_one_process_writes_and_adapters_are_saved_unwrapped(zero2, ddp, fsdp2, zero3):
    expected = load_file(zero2 / "one-lora-padded" / "adapter" / "adapter_model.safetensors")
    for name in ("zero2", "ddp", "zero2-to-fsdp2", "zero3"):
        run = RunDir(zero2 / f"{name}-lora-padded")
        found = load_file(run.adapter / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert torch.allclose(tensor, expected[key], rtol=1e-4, atol=1e-6), key
        lines = run.metrics.read_text().splitlines()
        assert len(lines) == len({(json.loads(line)["step"], "eval/loss" in line) for line in lines})
        assert len(list(run.tensorboard.glob("events*"))) <= 1


def test_ddp_looks_for_no_unused_parameters_and_keeps_gradients_once(ddp):
    found = json.loads((ddp / "looked" / "seen.0.json").read_text())["ddp"]
    assert found == {
        "find_unused_parameters": False, "broadcast_buffers": False,
        "gradient_as_bucket_view": True, "static_graph": False,
        "bucket_bytes_cap": 2**20,
    }  # fmt: skip


def test_batches_are_computed_where_they_are(ddp):
    """torch copies a tensor of the CPU that is moved to the first CPU, as accelerate calls it."""
    found = json.loads((ddp / "looked" / "seen.0.json").read_text())
    assert (found["device"], found["copies"]) == ("cpu", False)


def test_each_row_reaches_one_rank_once_an_epoch(ddp):
    seen = [json.loads((ddp / "looked" / f"seen.{rank}.json").read_text())["rows"] for rank in range(2)]
    assert [len(batches) for batches in seen] == [9, 9]  # 3 steps x 3 micro-batches
    rows = [tuple(token for token in row if token) for batches in seen for batch in batches for row in batch]
    real = sorted(row for row in rows if row)
    assert real == sorted(tuple(row["input_ids"]) for row in token_rows(EPOCH_ROWS, seed=5))
    assert all(batch for batches in seen for batch in batches)  # a rank without rows gets a filler
