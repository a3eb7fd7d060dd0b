"""Before training, other kernels are timed beside those of the plan; here those of a CPU."""

import sys
import time
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sft_play.choices.kernels import COMPILED, LAYERS, LIBRARY
from sft_play.errors import ConfigError
from sft_play.job import request_of
from sft_play.launch import accelerate
from sft_play.model.layers import compilation, library_passes, own_passes
from sft_play.planning.answers.resumed import resumed_plan
from sft_play.planning.speed.timed_kernels import Verdict, read_verdicts, write_verdict
from sft_play.runlog import RunDir, read_json
from sft_play.train.kernel_turns import _path, require_same_results, rivals_of
from tests.conftest import REPOSITORY
from tests.integration.cli import make_workspace, sft
from tests.integration.test_probe import ROWS, proven, sized
from tests.jobs import make_job

pytestmark = pytest.mark.thorough
SETTINGS = dict(rows=ROWS, probe="search", batch_size=16, gradient_checkpointing=False)  # without rivals


@pytest.fixture(autouse=True)
def _no_record_of_another_test(tmp_path, make_cache, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(make_cache(tmp_path / "cache")))


def with_norms(monkeypatch, act):
    """The only other kernels are those with norms of our own after which `act(result, x)` is done."""

    def norm_forward(module, x):
        found = own_passes.norm_forward(module, x)
        return found if isinstance(x, FakeTensor) else act(found, x)

    code = ModuleType("odd_kernels")
    code.norm_forward, code.rotated, code.STAND_INS = norm_forward, own_passes.rotated, {}
    code.forward_for = own_passes.forward_for
    monkeypatch.setitem(sys.modules, code.__name__, code)
    # still a row: what is asked of models here is kept for other tests
    monkeypatch.setitem(LAYERS, LIBRARY.name, replace(LIBRARY, on_cpu=False))
    row = replace(LIBRARY, name="odd", code=code.__name__, label="Odd kernels")
    monkeypatch.setitem(LAYERS, "odd", row)


def slow(found, x):
    time.sleep(0.1)
    return found


def with_another_gradient(found, x):
    return found + 0.05 * (x - x.detach())


def out_of_memory(found, x):
    raise torch.OutOfMemoryError("too much")


def dies(found, x):
    raise RuntimeError("the compiler gave up\nand more")


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (slow, ""),
        (with_another_gradient, "their result differs: gradient norm"),
        (out_of_memory, "memory ran out"),
        (dies, "they failed: RuntimeError: the compiler gave up"),
    ],
)
def test_kernels_that_are_slower_or_wrong_or_fail_are_left_out_and_not_asked_again(
    tiny_model, tmp_path, monkeypatch, capsys, act, problem
):
    with_norms(monkeypatch, act)
    job = sized(make_job(tiny_model, tmp_path, "odd", **SETTINGS))
    session, result = proven(job)
    said = " ".join(capsys.readouterr().out.split())
    assert session.job.plan.kernels.layers == "own" and session.job.plan.kernels_origin is None
    assert "timed: Odd kernels: " in said and problem in said
    assert read_verdicts(_path(job))["odd"].problem.startswith(problem)
    inputs = session.trainer.data_collator([session.rows.dataset[0]])
    session.trainer.model(**inputs)  # by ours again: with the others it would fail
    proven(job)
    assert "timed: Odd kernels" not in capsys.readouterr().out


def trained_on_two(script: str, tiny_model, tmp_path, monkeypatch, *words):
    """What a run of two ranks prints, each of them started by a script of these tests, and its plan."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(accelerate, "SCRIPT", REPOSITORY / "tests" / "integration" / script)
    config = make_workspace(tmp_path / "work", tiny_model)
    words += ("train.effective_batch_size=8", "train.gradient_checkpointing=false", "train.max_steps=2")
    more = ("--processes", "2", "--engine", "ddp", "train.probe=search", "eval.generate=false")
    done = sft("train", "--config", config, *words, *more)
    assert done.code == 0, done.err
    return done.out, read_json(RunDir(config.parent / "runs" / "one").plan)["plan"]


@pytest.mark.slow
def test_two_ranks_go_by_the_slower_of_them(tiny_model, tmp_path, monkeypatch):
    """Rank 0 alone would take those of transformers, which are slow on rank 1."""
    out, plan = trained_on_two("slowed_rank.py", tiny_model, tmp_path, monkeypatch)
    assert "timed: The passes of transformers: a step took" in out and "not a clear gain" in out
    assert plan["kernels"] == "own"


@pytest.mark.slow
def test_two_ranks_try_compiled_layers_together(tiny_model, tmp_path, monkeypatch):
    out, plan = trained_on_two("compiling_rank.py", tiny_model, tmp_path, monkeypatch, "train.kernels=own")
    assert out.count("timed: Compiled layers: a step took") == 1
    assert plan["compile"] is True and plan["kernels_origin"] == "probe"


def test_the_faster_kernels_are_trained_remembered_and_kept_by_a_run_that_goes_on(
    tiny_model, tmp_path, monkeypatch, capsys
):
    """Ours are slowed down; so those of transformers win."""
    forward = own_passes.norm_forward
    monkeypatch.setattr(own_passes, "norm_forward", lambda module, x: slow(forward(module, x), x))
    job = sized(make_job(tiny_model, tmp_path, "faster", **SETTINGS))
    asked = sized(make_job(tiny_model, tmp_path, "asked", kernels="own", **SETTINGS))
    session, result = proven(job)
    plan = session.job.plan
    assert (plan.kernels.layers, plan.kernels_origin) == ("library", "probe")
    assert any("timed here before step 1: The passes of transformers" in why for why in plan.why)
    assert result.fits(plan) and plan.step_seconds == result.step_seconds
    again = sized(make_job(tiny_model, tmp_path, "again", **SETTINGS)).plan
    assert (again.kernels.layers, again.kernels_origin) == ("library", "probe")
    assert resumed_plan(request_of(job), job.plan).kernels.layers == "own"
    assert resumed_plan(request_of(job), plan).kernels.layers == "library"
    capsys.readouterr()
    assert proven(asked)[0].job.plan.kernels.layers == "own" and "timed: The" not in capsys.readouterr().out


@pytest.fixture
def compiles(monkeypatch):
    """What a CPU lacks is claimed for it: that layers are faster after a second of compiling."""
    monkeypatch.setitem(COMPILED.expected, "cpu", (1.0, 1.41))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compilation._compiled.cache_clear()  # by the compiler of another test
    yield
    compilation._compiled.cache_clear()


def slow_unless_compiled(found, x):
    if not torch.compiler.is_compiling():
        time.sleep(0.02)
    return found


LONG = dict(rows=ROWS, probe=True, kernels="own", batch_size=16, max_steps=100_000)


def test_a_long_run_may_try_compiled_layers_and_goes_by_what_was_found(tiny_model, tmp_path, compiles):
    job = sized(make_job(tiny_model, tmp_path, "long", **LONG))
    assert rivals_of(job, 1e-6) == {} and rivals_of(job, 0.1).keys() == {"compiled"}
    off = make_job(tiny_model, tmp_path, "off", compile=False, **LONG)
    assert rivals_of(sized(off), 0.1) == {} and not job.plan.kernels.compiled
    write_verdict(_path(job), "compiled", Verdict(seconds=0.1, beside=0.2, first_seconds=30.0))
    plan = sized(make_job(tiny_model, tmp_path, "again", **LONG)).plan
    assert (plan.kernels.compiled, plan.kernels_origin) == (True, "probe")
    assert any("layers are compiled, since steps timed on this device were faster" in why for why in plan.why)
    assert not sized(
        make_job(tiny_model, tmp_path, "short", **LONG | {"max_steps": 200})
    ).plan.kernels.compiled
    assert not sized(off).plan.kernels.compiled
    assert (
        not resumed_plan(request_of(job), job.plan).kernels.compiled
        and resumed_plan(request_of(job), plan).kernels.compiled
    )


@pytest.mark.slow
def test_it_tries_them_and_keeps_them_where_they_are_faster(tiny_model, tmp_path, monkeypatch, compiles):
    forward = own_passes.norm_forward
    monkeypatch.setattr(
        own_passes, "norm_forward", lambda module, x: slow_unless_compiled(forward(module, x), x)
    )
    plan = proven(sized(make_job(tiny_model, tmp_path, "long", **LONG)))[0].job.plan
    assert (plan.kernels.compiled, plan.kernels.layers, plan.kernels_origin) == (True, "own", "probe")
    assert any("timed here before step 1: Compiled layers: a step took" in why for why in plan.why)
    again = sized(make_job(tiny_model, tmp_path, "again", **LONG)).plan
    assert (again.kernels.compiled, again.kernels_origin) == (True, "probe")


@pytest.mark.slow
def test_they_are_tried_too_where_other_kernels_have_won_and_take_their_place(
    tiny_model, tmp_path, monkeypatch, compiles
):
    settings = LONG | {"kernels": "auto"}
    job = sized(make_job(tiny_model, tmp_path, "first", **settings))
    write_verdict(_path(job), "library", Verdict(seconds=0.1, beside=0.11))
    job = sized(make_job(tiny_model, tmp_path, "faster", **settings))
    assert (job.plan.kernels.layers, job.plan.kernels_origin) == ("library", "probe")
    (rival,) = rivals_of(job, 0.1).values()
    assert (rival.plan.kernels.layers, rival.plan.kernels.compiled) == ("own", True)
    slowly = library_passes.norm_forward
    monkeypatch.setattr(library_passes, "norm_forward", lambda module, x: slow(slowly(module, x), x))
    session, _ = proven(job)
    assert (session.job.plan.kernels.layers, session.job.plan.kernels.compiled) == ("own", True)
    norms = [module for module in session.trainer.model.modules() if isinstance(module, LlamaRMSNorm)]
    in_layers = {own_passes.forward_of(norm).__func__ for norm in norms}
    assert in_layers == {own_passes.norm_forward}  # ours are what is compiled
    verdict = read_verdicts(_path(job))["compiled"]
    assert verdict.wins and verdict.beside > 0.1  # of our own, which are slower than those that won
    again = sized(make_job(tiny_model, tmp_path, "again", **settings)).plan
    assert (again.kernels.layers, again.kernels.compiled) == ("own", True)


@pytest.mark.slow
def test_compiled_layers_that_are_no_faster_are_left_out_and_that_is_said(
    tiny_model, tmp_path, capsys, compiles
):
    """The operations that aot_eager calls are those of layers that are not compiled."""
    session, _ = proven(sized(make_job(tiny_model, tmp_path, "long", **LONG)))
    said = " ".join(capsys.readouterr().out.split())
    assert "timed: Compiled layers: a step took" in said and ", not a clear gain" in said
    assert not session.job.plan.kernels.compiled and session.job.plan.kernels_origin is None


def with_another_gradient_if_compiled(found, x):
    return with_another_gradient(found, x) if torch.compiler.is_compiling() else found


@pytest.mark.slow
def test_compiled_layers_that_were_asked_for_are_compared_with_plain_ones(
    tiny_model, tmp_path, monkeypatch, capsys, compiles
):
    settings = LONG | dict(compile=True, max_steps=2)
    session, _ = proven(sized(make_job(tiny_model, tmp_path, "right", **settings)))
    said = capsys.readouterr()
    assert session.job.plan.kernels.compiled and "not compared with" not in said.out + said.err
    unknown = replace(session.job, plan=replace(session.job.plan, memory=None))
    require_same_results(replace(session, job=unknown))
    assert "not compared with plain ones, which may not fit" in " ".join(capsys.readouterr().out.split())
    layers = compilation.plain_forwards(session.trainer.model)
    assert all(own_passes.forward_of(layer) != plain for layer, plain in layers.items())  # as before
    forward = own_passes.norm_forward
    monkeypatch.setattr(
        own_passes,
        "norm_forward",
        lambda module, x: with_another_gradient_if_compiled(forward(module, x), x),
    )
    compilation._compiled.cache_clear()
    with pytest.raises(ConfigError, match=r"train.compile=true: .* something else .*gradient norm .*false"):
        proven(sized(make_job(tiny_model, tmp_path, "wrong", **settings)))
