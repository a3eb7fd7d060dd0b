"""The race of toolkits: its stopwatch over real loops, the same work for every toolkit, and runs that can be continued."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import yaml

from benchmarks.peers import __main__ as peers
from benchmarks.peers import race
from benchmarks.peers.contestants import CONTESTANTS, HERE, REFERENCE, Contestant, Script, split
from benchmarks.peers.environments import ENVIRONMENTS, CannotInstall, Environment
from benchmarks.peers.race import RunFailed, figures
from benchmarks.peers.report import Lines, summary, table
from benchmarks.peers.work import (
    CHAT_TEMPLATE,
    LONGEST,
    MEDIAN,
    P95,
    PAD,
    PAD_ID,
    TEMPLATE_TOKENS,
    Row,
    Work,
    gsm8k_rows,
    tailed_lengths,
    tailed_rows,
    trained_tokenizer,
)

ROWS = (Row("How many?", "Three."), Row("And then?", "Four, or five."))
LOOP = """
import importlib.util, time
assert importlib.util.find_spec("torch")  # to look for it is not to import it
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

layer = torch.nn.Embedding(10, 4)
def step(optimizer, *batches):
    for batch in batches:
        layer(torch.tensor(batch)).sum().backward()
    optimizer.step()
step(torch.optim.SGD(layer.parameters(), 0.0), [[1, 2]])  # a probe, with an optimizer of its own
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
step(optimizer, [[1, 2, 3]])
with FakeTensorMode():
    torch.nn.Embedding(10, 4)(torch.tensor([[1] * 100]))
torch.nn.Embedding(10, 4, device="meta")(torch.ones(1, 100, dtype=torch.long, device="meta"))
with torch.no_grad():
    layer.eval()(torch.tensor([[1] * 100]))
layer.train()
time.sleep(0.1)
step(optimizer, [[1, 2, 0], [3, 0, 0]], [[4, 5]])
step(optimizer, [[6, 7, 8, 9]])
"""


def small_work(folder: Path, **changes) -> Work:
    return replace(Work("gsm8k", folder / "model", ROWS * 8, ROWS), **changes)


def watched(code: str, folder: Path) -> list[dict]:
    """What the stopwatch records of a Python process that runs the code."""
    variables = {"PYTHONPATH": str(HERE / "injected"), "PEERS_WATCH": str(folder), "PEERS_PAD_ID": "0"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True, timeout=300)
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


@pytest.mark.thorough
def test_the_stop_watch_counts_what_training_is_fed_and_nothing_else(tmp_path):
    (record,) = watched(LOOP, tmp_path)
    assert [step["optimizer"] for step in record["steps"]] == [0, 1, 1, 1]
    assert [(step["tokens"], step["padding"]) for step in record["steps"]] == [(2, 0), (3, 0), (5, 3), (4, 0)]
    assert record["steps"][2]["began"] >= record["steps"][1]["time"] + 0.1  # after the pause between them
    found = figures([record], began=record["steps"][1]["time"] - 7)
    assert (found["steps"], found["timed_tokens"], found["start_up_seconds"]) == (3, 9, 7.0)
    assert 0 <= found["first_step_seconds"] < 7
    assert found["padding_share"] == pytest.approx(3 / 12)
    assert 0.1 <= found["timed_seconds"] == pytest.approx(sum(found["step_seconds"]), abs=0.01)
    assert found["tokens_per_second"] == pytest.approx(9 / found["timed_seconds"], rel=0.01)


def test_a_process_without_torch_or_steps_leaves_nothing(tmp_path):
    assert not watched("import sys; assert 'torch' not in sys.modules", tmp_path)
    with pytest.raises(RunFailed, match="0 optimizer steps"):
        figures([], 0.0)


def test_the_process_that_trained_last_counts():
    def record(*times):
        steps = [{"began": 0.0, "time": time, "optimizer": 0, "tokens": 10, "padding": 0} for time in times]
        return {"torch": "2", "threads": 2, "peak_kib": 2048, "steps": steps}

    assert figures([record(1.0, 2.0), record(3.0, 4.0, 5.0)], 0.0)["steps"] == 3
    with pytest.raises(RunFailed, match="1 optimizer steps"):
        figures([record(1.0)], 0.0)


def test_tailed_rows_have_the_lengths_that_are_promised():
    lengths = tailed_lengths(256)
    assert statistics.median(lengths) == pytest.approx(MEDIAN, rel=0.02) and max(lengths) == LONGEST
    assert sorted(lengths)[int(0.95 * 256)] == pytest.approx(P95, rel=0.05)
    rows = tailed_rows(256, "train")
    assert rows == tailed_rows(256, "train") and rows != tailed_rows(256, "test")
    tokenizer = trained_tokenizer(rows)
    found = [tokenizer.encode(row.prompt + row.completion).ids for row in rows]
    assert sorted(map(len, found)) == lengths
    assert tokenizer.token_to_id(PAD) == PAD_ID and not any(PAD_ID in ids for ids in found)
    assert len(found[0]) == len(f"{rows[0].question} {rows[0].answer}".split()) + TEMPLATE_TOKENS


def test_the_chat_template_writes_what_those_get_who_have_none():
    row = ROWS[0]
    turns = [{"role": "user", "content": row.question}, {"role": "assistant", "content": row.answer}]
    assert jinja2.Template(CHAT_TEMPLATE).render(messages=turns) == row.prompt + row.completion
    asked = jinja2.Template(CHAT_TEMPLATE).render(messages=turns[:1], add_generation_prompt=True)
    assert asked == row.prompt


def test_the_first_rows_of_gsm8k_are_taken(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row._asdict()) + "\n" for row in ROWS))
    assert gsm8k_rows(tmp_path, "train.jsonl", 1) == ROWS[:1]
    assert gsm8k_rows(tmp_path, "train.jsonl", 9) == ROWS


def prepared(contestant: Contestant, work: Work, folder: Path) -> tuple[Script, str]:
    """What runs, and all that was written for it."""
    folder.mkdir()
    script = contestant.prepare(work, folder, contestant.variant)
    return script, "".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda each: each.name)
def test_everyone_is_told_the_same_work(contestant, tmp_path):
    work = small_work(tmp_path, rank=23, alpha=41, learning_rate=0.00375, max_tokens=512)
    script, written = prepared(contestant, work, tmp_path / "run")
    for value in (work.rank, work.alpha, work.learning_rate, work.max_tokens):
        assert str(value) in written
    assert str(work.model) in written + " ".join(script.before)
    assert min(written.count(row.answer) for row in ROWS) >= len(work.rows) / 2
    assert script.trained.is_relative_to(tmp_path / "run")
    assert contestant.environment in ENVIRONMENTS


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda each: each.name)
def test_a_step_is_equally_large_everywhere(contestant, tmp_path):
    work = small_work(tmp_path)
    prepared(contestant, work, tmp_path / "run")
    (path,) = (path for path in (tmp_path / "run").iterdir() if path.name in ("config.yaml", "work.json"))
    config = yaml.safe_load(path.read_text())
    flat = config | config.get("train", {})
    packed = contestant.name.endswith("packed")
    said = [flat.get(name) for name in ("effective_batch_size", "global_batch_size", "rows_per_step")]
    micro_batch = flat.get("per_device_train_batch_size", flat.get("batch_size"))
    if micro_batch:
        said.append(micro_batch * flat["gradient_accumulation_steps"] * (work.max_tokens if packed else 1))
    assert [size for size in said if size] == [work.tokens_per_step if packed else work.rows_per_step]
    assert packed is any(f"{name}: true" in path.read_text() for name in ("packing", "packed"))


def test_small_steps_have_small_micro_batches(tmp_path):
    work = small_work(tmp_path, rows_per_step=4, tokens_per_step=1024)
    assert split(work, 8, packed=False) == (4, 1) and split(work, 1, packed=False) == (1, 4)
    assert split(work, 8, packed=True) == (1, 1)


def speed(tokens_per_second: float, **changes) -> dict:
    values = {
        "tokens_per_second": tokens_per_second,
        "padding_share": 0.1,
        "start_up_seconds": 5.0,
        "peak_mib": 900,
    }
    return values | {"steps": 16, "problem": None} | changes


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """The program without its contestants: every run is as fast as `outcomes` says, and is written down."""
    monkeypatch.chdir(tmp_path)
    outcomes, ran = {}, []

    def run(contestant, work, folder, *, judge):
        ran.append((contestant.name, judge))
        found = outcomes.get(contestant.name, speed(100.0))
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers, "make_work", lambda data, *_, **__: small_work(tmp_path, data=data))
    monkeypatch.setattr(
        peers, "versions", lambda contestants: {name: {"torch": "2"} for name in ENVIRONMENTS}
    )
    monkeypatch.setattr(peers, "commit", lambda: "abc")
    monkeypatch.setattr(peers, "RESULT", tmp_path / "result.json")
    return outcomes, ran


def test_a_benchmark_that_was_cut_off_goes_on_and_what_failed_is_tried_again(benchmark, tmp_path):
    outcomes, ran = benchmark
    outcomes["trl"] = KeyboardInterrupt()
    words = ["--contestants", "sft-play,trl,bare loop", "--data", "tailed", "--rounds", "2"]
    with pytest.raises(KeyboardInterrupt):
        peers.main(words)
    assert ran == [("sft-play", True), ("trl", True)] and not peers.RESULT.exists()
    outcomes["trl"] = {"problem": "no such kernel"}
    ran.clear()
    assert peers.main(words) == 1
    assert ran == [
        ("trl", True),
        ("bare loop", True),
        ("trl", False),
        ("bare loop", False),
        ("sft-play", False),
    ]
    outcomes["trl"] = speed(50.0)
    ran.clear()
    assert peers.main(words) == 0
    assert ran == [("trl", True), ("trl", False)]
    result = json.loads(peers.RESULT.read_text())
    assert [entry["ratio"] for entry in result["results"]["tailed"]] == [1.0, 0.5, 1.0]
    assert (
        result["versions"]["project"]["torch"] == "2"
        and result["hardware"]["cores"]
        and result["commit"] == "abc"
    )


def test_data_that_is_missing_is_named(benchmark, monkeypatch, capsys):
    def no_data(data, *_, **__):
        raise FileNotFoundError(2, "No such file", "data/gsm8k/train.jsonl")

    monkeypatch.setattr(peers, "make_work", no_data)
    assert peers.main(["--data", "gsm8k"]) == 0
    assert "gsm8k" in json.loads(peers.RESULT.read_text())["skipped"]
    assert "skipped" in capsys.readouterr().out


def test_a_name_that_nobody_has_is_an_error():
    with pytest.raises(SystemExit, match="'axolotl' is not one of"):
        peers.main(["--contestants", "axolotl"])


def test_everyone_runs_once_a_round_and_the_order_turns():
    found = list(peers.turns(["a", "b", "c"], ["x"], 3))
    assert [name for number, _, name in found if number == 1] == ["b", "c", "a"]
    assert len(set(found)) == 9


def test_lines_of_another_machine_and_half_lines_do_not_count(tmp_path):
    who = {"data": "x", "contestant": "trl"}
    lines = Lines(tmp_path / "lines.jsonl", {("x", "trl"): {"cpu": "one"}})
    lines.add(who | {"round": 0})
    Lines(lines.path, {("x", "trl"): {"cpu": "other"}}).add(who | {"round": 1})
    with lines.path.open("a") as file:
        file.write('{"round": 2')
    lines.add(who | {"round": 3})
    assert [line["round"] for line in lines.read()] == [0, 3]
    assert not Lines(lines.path, {("x", "litgpt"): {"cpu": "one"}}).read()


def test_medians_ratios_and_reasons_are_shown():
    from rich.console import Console

    runs = [("sft-play", speed(value, loss=7.5)) for value in (300.0, 100.0, 200.0)]
    runs += [
        ("trl", speed(50.0, loss=None, note="no adapter")),
        ("litgpt", {"problem": "cannot be installed: gone"}),
    ]
    lines = [{"data": "x", "contestant": name} | line for name, line in runs]
    entries = summary(lines, "x", [REFERENCE, "trl", "litgpt"])
    assert [entry["tokens_per_second"] for entry in entries] == [200.0, 50.0, None]
    assert [entry["ratio"] for entry in entries] == [1.0, 0.25, None]
    assert entries[1]["notes"] == ["no adapter"] and entries[1]["loss"] is None
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table(entries, "x"))
    shown = captured.get()
    assert "0.25" in shown and "litgpt: cannot be installed: gone" in shown


def test_what_cannot_be_installed_or_fails_is_a_result(tmp_path, monkeypatch):
    def fails(work, folder, variant):
        return Script(("python", "-c", "raise SystemExit('no such option')"), folder)

    contestant = Contestant("own", "project", fails)
    line = race.run(contestant, small_work(tmp_path), tmp_path / "run", judge=False)
    assert line["problem"] == "exit code 1: no such option" and len(line["load_average"]) == 3
    monkeypatch.setattr(Environment, "install", lambda self: (_ for _ in ()).throw(CannotInstall("no wheel")))
    line = race.run(contestant, small_work(tmp_path), tmp_path / "run", judge=False)
    assert line["problem"] == "cannot be installed: no wheel"


def test_an_environment_is_made_once_and_again_when_its_words_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr("benchmarks.peers.environments._run", lambda words: made.append(words))
    first = Environment("one", (("thing==1",),))
    for environment in (first, first, Environment("one", (("thing==2",),)), Environment("project")):
        environment.folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr("benchmarks.peers.environments.shutil.rmtree", lambda *_, **__: None)
        environment.install()
    assert [words[-1] for words in made if "pip" in words] == ["thing==1", "thing==2"]
