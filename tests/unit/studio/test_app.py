"""The studio's pages, asked for in this process: what they show, and what they refuse."""

import html
import json
import os
import re
import shutil
import threading
from contextlib import ExitStack

import pytest
from werkzeug.test import Client

from sft_play.report.run_page import run_page
from sft_play.report.runs_page import run_row
from sft_play.report.sound import read_sound
from sft_play.runlog import RunDir, append_metrics, update_summary
from sft_play.studio import folder as studio_folder
from sft_play.studio.app import Studio
from sft_play.studio.planner import Planner
from tests.unit.report.written_run import ATTACK, begin, finished, held, no_plots, train, written_later  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_plots")

TOKEN = "hf_" + "abcdefghij" * 3


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    finished(folder / "one")
    finished(folder / "two")
    return folder


@pytest.fixture
def browser(runs) -> Client:
    return Client(Studio(runs, Planner()))


def text_of(response) -> str:
    """The page without tags and style, in one line."""
    body = response.text.partition("<body")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_list_shows_each_run_with_its_numbers_and_leads_to_it(browser):
    page = browser.get("/")
    assert page.status_code == 200 and page.mimetype == "text/html"
    assert "2 runs" in page.text and 'href="/runs/one"' in page.text and 'href="/runs/two"' in page.text
    shown = "one done base LoRA one process CPU 20 1.0000 2.0000 exact match 50.0% 1,000 1.01 GiB 2026-11-20 10:30"
    assert shown in text_of(page)


def test_the_list_is_sorted_by_a_column_and_shows_the_runs_with_some_words(browser, runs):
    for name, tokens in (("one", 900.0), ("two", 1000.0)):
        update_summary(RunDir(runs / name), tokens_per_second=tokens)
    begin(runs / "three", note=f"lower {ATTACK}")

    def names(query: str) -> list[str]:
        return re.findall(r'href="/runs/(\w+)"', browser.get(f"/?{query}").text)

    assert names("sort=tokens/s") == ["one", "two", "three"]  # what has no value comes last
    assert names("sort=-tokens/s") == ["two", "one", "three"]
    assert names("sort=-run") == ["two", "three", "one"]
    assert names("find=LoRA+two") == ["two"] and names("find=lower") == ["three"] and names("find=x9") == []
    page = browser.get("/?find=exact&sort=-steps")
    assert "3 runs" in page.text and "; 2 shown" in page.text and "<script>" not in page.text
    assert 'aria-sort="descending"><a href="/?find=exact&amp;sort=steps">steps' in page.text
    assert len(names("sort=nonsense")) == 3


def test_a_folder_without_runs_says_what_to_do(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        assert "make train" in Client(Studio(folder, Planner())).get("/").text


def test_a_run_has_the_page_of_its_report_and_is_not_written_to(browser, runs):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    page = browser.get("/runs/one")
    assert "LoRA of base on rows.jsonl" in page.text and "Before and after training" in page.text
    assert "data-seconds" not in page.text and "<script" not in page.text  # it will not change any more
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_a_run_that_is_running_shows_its_step_and_the_time_left_and_updates_itself(browser, runs):
    run = train(begin(runs / "live"), steps=5)
    with held(run):
        written_later(run.plan)
        listed, page = text_of(browser.get("/")), browser.get("/runs/live")
        assert "live running step 5 of 20, about 9 s left base LoRA" in listed
        assert listed.index("live") < listed.index("one done")
        assert "Running: step 5 of 20, about 9 s left." in text_of(page)
        assert 'data-seconds="5"' in page.text and '<script src="/live.js" defer></script>' in page.text
        append_metrics(run, {"step": 6, "train/loss": 0.125, "speed/step_seconds": 0.6})
        again = browser.get("/runs/live", headers={"If-None-Match": page.headers["ETag"]})
        assert again.status_code == 200 and "step 6 of 20" in again.text
        same = browser.get("/runs/live", headers={"If-None-Match": again.headers["ETag"]})
        assert same.status_code == 304 and not same.data


def test_a_run_is_starting_until_its_plan_is_written_and_ending_after_its_summary(browser, runs):
    (runs / "new").mkdir()
    (runs / "new" / "log.txt").touch()
    with ExitStack() as stack:
        for name in ("new", "one"):
            stack.enter_context(held(RunDir(runs / name)))
        assert "new starting" in text_of(browser.get("/"))
        assert "Shown below: an earlier run" in text_of(browser.get("/runs/one"))
        written_later(RunDir(runs / "one").plan)
        assert "Running" in text_of(browser.get("/runs/one"))
        written_later(RunDir(runs / "one").summary, 2)
        assert "Finishing" in text_of(browser.get("/runs/one"))
    assert "Done." in text_of(browser.get("/runs/one"))


def test_a_run_whose_process_is_gone_is_unfinished(browser, runs):
    run = train(begin(runs / "killed"), steps=7)
    for lock in ("process 4194305 on " + os.uname().nodename, "process 1 on elsewhere", "nonsense", "\0"):
        (run.path / ".lock").write_text(lock)
        page = browser.get("/runs/killed")
        assert (
            "Not finished: no process on this machine is running it" in page.text and "7 of 20" in page.text
        )


@pytest.mark.parametrize("damage", ["{", "[]", '{"plan": 3}', '{"plan": {"total_steps": "x"}}', "\0"])
def test_damaged_files_are_said_and_do_not_hide_other_runs(browser, runs, damage):
    for name in ("plan.json", "summary.json", "environment.json", "metrics.jsonl", "config.resolved.yaml"):
        (runs / "two" / name).write_text(damage)
    assert "one done" in text_of(browser.get("/"))
    assert browser.get("/runs/two").status_code == 200
    assert browser.get("/compare?run=one&run=two").status_code == 200


BAD = ["NaN", "9" * 400, '"text"', "[]", "null", "-1"]
MORE = ["1e999", "-Infinity", "9" * 299, '{"a": 1}', "true"]


@pytest.mark.parametrize("name", ["summary.json", "plan.json", "environment.json", "data.json"])
@pytest.mark.parametrize(
    "value", [*BAD, *(pytest.param(value, marks=pytest.mark.thorough) for value in MORE)]
)
def test_wrong_values_in_a_file_hide_no_other_run(browser, runs, name, value):
    """All numbers and texts of the file at once, then its parts."""
    text = (runs / "two" / name).read_text()
    tree = json.loads(text)
    parts = "{" + ", ".join(f'"{key}": {value}' for key in tree) + "}"
    for changed in (re.sub(r'(?<=": )(?:[-0-9.e+]+|"[^"]*")(?=[,\n])', value.replace("\\", ""), text), parts):
        (runs / "two" / name).write_text(changed)
        listed = text_of(browser.get("/"))
        assert "one done base" in listed and "2 runs" in listed
        assert browser.get("/runs/two").status_code == 200
        assert browser.get("/compare?run=one&run=two").status_code == 200


def test_a_file_with_wrong_values_is_left_out_and_named(browser, runs):
    (runs / "two" / "plan.json").write_text('{"plan": {"total_steps": 20, "sequence_ranks": "x"}}')
    assert "two done; cannot be read: plan.json base" in text_of(browser.get("/"))
    assert "Damaged and omitted: plan.json." in text_of(browser.get("/runs/two"))
    assert "cannot be read" not in text_of(browser.get("/")).partition("two done")[0]


@pytest.mark.parametrize("line", ['{"step": %s, "train/loss": 1}', '{"step": 21, "train/loss": %s}'])
def test_wrong_values_in_metrics_hide_nothing(browser, runs, line):
    with (runs / "two" / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line % value}\n" for value in BAD + MORE)
    assert "one done base" in text_of(browser.get("/"))
    assert browser.get("/runs/two").status_code == 200
    assert browser.get("/compare?run=one&run=two").status_code == 200


def test_a_folder_whose_name_is_not_utf8_is_listed_without_a_page(browser, runs):
    (runs / "two").rename(os.fsdecode(os.fsencode(runs) + b"/caf\xe9"))
    listed = browser.get("/")
    assert r"caf\xe9 done; its name is not UTF-8: rename the folder" in text_of(listed)
    assert listed.text.count('href="/runs/') == 1 and listed.text.count('name="run"') == 1
    assert browser.get("/runs/caf%E9").status_code == 404


@pytest.mark.parametrize("kind", ["link", "device", "pipe"])
def test_no_file_of_a_run_is_followed_or_waited_for(browser, runs, kind):
    (runs.parent / "secret.json").write_text('{"status": "secret", "prompt": "secret"}')
    for file in list((runs / "two").iterdir()):
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to("/dev/zero" if kind == "device" else runs.parent / "secret.json")
    listed = text_of(browser.get("/"))
    assert "one done base" in listed and "secret" not in listed and "cannot be read: " in listed
    page = browser.get("/runs/two")
    assert page.status_code == 200 and "secret" not in page.text and "metrics.jsonl" in page.text
    assert browser.get("/compare?run=one&run=two").status_code == 200


def test_runs_that_have_not_changed_are_not_read_again(browser, runs, monkeypatch):
    assert "2 runs" in browser.get("/").text
    read = []
    monkeypatch.setattr(studio_folder, "read_sound", lambda path: read.append(path.name) or read_sound(path))
    assert "one done" in text_of(browser.get("/")) and read == []
    append_metrics(RunDir(runs / "two"), {"step": 21, "train/loss": 0.125})
    assert "CPU 21 0.1250" in text_of(browser.get("/")) and read == ["two"]
    shutil.rmtree(runs / "one")
    assert "1 run in" in browser.get("/").text and read == ["two"]


def test_the_list_waits_for_no_drawing_and_no_drawing_for_the_list(runs, monkeypatch):
    studio = Studio(runs, Planner())
    browser, wait = Client(studio), threading.Event()
    monkeypatch.setattr("sft_play.studio.app.run_page", lambda run: wait.wait(30) and run_page(run))
    drawing = threading.Thread(target=lambda: Client(studio).get("/runs/one"))
    drawing.start()
    assert "2 runs" in browser.get("/").text and drawing.is_alive()
    wait.set()
    drawing.join()
    reads, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(
        studio_folder, "run_row", lambda run: reads.set() or goes_on.wait(30) and run_row(run)
    )
    finished(runs / "three")
    listing = threading.Thread(target=lambda: Client(studio).get("/"))
    listing.start()
    assert reads.wait(30) and browser.get("/runs/two").status_code == 200 and listing.is_alive()
    goes_on.set()
    listing.join()


def test_two_runs_are_compared_and_one_is_not_enough(browser):
    page = browser.get("/compare?run=one&run=two")
    assert "2 runs of SFT-Play compared" in page.text and "Key numbers" in page.text
    for query in ("", "?run=one", "?run=one&run=one", "?" + "&".join(f"run={n}" for n in range(9))):
        answer = browser.get(f"/compare{query}")
        assert answer.status_code == 400 and "Mark 2 to 8 runs in the list" in answer.text
        assert "This cannot be shown" in answer.text and "Bad Request" not in answer.text
    assert browser.get("/compare?run=one&run=none").status_code == 404
    assert "The studio has no page at this address." in browser.get("/nothing").text


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "..%2F..%2Foutside",
        "%2e%2e%2foutside",
        "%2Fetc",
        "one%2F..%2Ftwo",
        "one%00",
        "out",
        ".hidden",
        "%FF",
    ],
)
def test_no_name_leads_out_of_the_folder(browser, runs, name):
    finished(runs.parent / "outside")
    finished(runs / ".hidden")
    (runs / "out").symlink_to(runs.parent / "outside")
    answer = browser.get(f"/runs/{name}")
    assert answer.status_code in (404, 308) and "LoRA of base" not in answer.text
    assert browser.get(f"/compare?run=one&run={name}").status_code == 404
    assert "out done" not in text_of(browser.get("/"))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:7007", "", "127.0.0.1:x"]
)
def test_only_names_of_this_machine_are_answered(browser, host):
    answer = browser.get("/", headers={"Host": host})
    assert answer.status_code == 400 and "one" not in text_of(answer).split()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7007", "localhost:8080"])
def test_any_port_will_do(browser, host):
    assert browser.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/runs/one", "/compare", "/plan", "/live.js"])
def test_nothing_but_reading_is_allowed(browser, method, path):
    answer = browser.open(path, method=method)
    assert answer.status_code == 405 and set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "path", ["/", "/runs/one", "/plan", "/live.js", "/nothing", "/runs/none", "/compare"]
)
def test_every_answer_has_the_policy(browser, path):
    answer = browser.get(path)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy and "unsafe-inline" not in policy.replace(
        "style-src 'unsafe-inline'", ""
    )
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert 'http-equiv="Content-Security-Policy"' not in answer.text


def test_texts_of_people_are_not_markup_and_tokens_are_masked(browser, runs):
    name = f"{ATTACK.replace('/', '_')} {TOKEN}"
    run = finished(runs / name)
    run.write_json(run.summary, {"status": "failed", "error": f"<b>no</b> {TOKEN}"})
    run.summary.write_text(run.summary.read_text().replace("*" * len(TOKEN), TOKEN))
    for path in ("/", "/compare?run=one&run=" + name, f"/runs/{name}", f"/runs/{ATTACK}", f"/runs/{TOKEN}"):
        page = browser.get(path).text
        assert "<script>" not in page and "<b>" not in page and TOKEN not in page


def test_an_error_of_ours_is_one_page_and_its_trace_is_printed_without_tokens(browser, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError(TOKEN)

    monkeypatch.setattr("sft_play.studio.app.runs_page", fail)
    answer = browser.get("/")
    assert (
        answer.status_code == 500 and "bug in SFT-Play" in answer.text and "RuntimeError" not in answer.text
    )
    printed = capsys.readouterr().err
    assert "RuntimeError" in printed and TOKEN not in printed


def test_the_script_is_a_file_of_its_own_and_the_icon_is_nothing(browser):
    script = browser.get("/live.js")
    assert script.mimetype == "text/javascript" and "fetch(location.href" in script.text
    assert browser.get("/favicon.ico").status_code == 204
