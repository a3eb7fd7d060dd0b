"""The plan explorer: what may be asked, one plan at a time, and what a page shows meanwhile."""

import sys
import time

import psutil
import pytest
from werkzeug.test import Client

from sft_play.model.architecture.published import hub_name
from sft_play.spelling import BY_MAKE
from sft_play.studio.app import Studio
from sft_play.studio.planner import Answer, Busy, Planner, Question, Waiting

FORM = "model=Qwen/Qwen3-8B&gpu=NVIDIA+GeForce+RTX+4090&gpus=1&method=qlora"


def script(text: str):
    """Runs a Python script instead of planning."""
    return lambda question: [sys.executable, "-c", text, *question.arguments]


@pytest.fixture
def planners():
    """Makes planners that are closed at the end."""
    made = []

    def make(text: str, **settings) -> Planner:
        made.append(Planner(script(text), **settings))
        return made[-1]

    yield make
    for planner in made:
        planner.close()


def answer_of(planner: Planner, question: Question, within_s: float = 20) -> Answer:
    deadline = time.monotonic() + within_s
    while isinstance(found := planner.ask(question), Waiting):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


SLEEP = "import time; time.sleep(600)"
ECHO = "import json, sys; print(json.dumps(sys.argv[1:]and{'words': sys.argv[1:]}))"


def test_without_make_a_question_is_a_command_of_sft_play(monkeypatch):
    monkeypatch.delenv(BY_MAKE)
    question = Question("m", "NVIDIA L4", 2, "qlora")
    assert question.command == "sft-play plan --model m --gpu 'NVIDIA L4' --gpus 2 tuning.mode=qlora"


def test_a_question_is_the_command_that_a_person_types():
    question = Question("Qwen/Qwen3-8B", "NVIDIA GeForce RTX 4090", 2, "qlora")
    assert question.command == "make plan MODEL=Qwen/Qwen3-8B GPU='NVIDIA GeForce RTX 4090' NGPU=2 MODE=qlora"
    assert " ".join(question.arguments) == (
        "plan --model Qwen/Qwen3-8B --gpu NVIDIA GeForce RTX 4090 --gpus 2 --json tuning.mode=qlora"
    )
    costly = Question("m", "g", 1, "lora", rows="5000", tokens="900", context="4096", price="2.5")
    assert costly.command == (
        "make plan MODEL=m GPU=g NGPU=1 MODE=lora ROWS=5000 TOKENS=900 GPU_HOUR=2.5 "
        'ARGS="model.max_seq_len=4096"'
    )
    assert costly.arguments[3:] == [
        *("--gpu", "g", "--gpus", "1", "--rows", "5000", "--tokens", "900", "--gpu-hour", "2.5", "--json"),
        *("tuning.mode=lora", "model.max_seq_len=4096"),
    ]
    assert Question("m").command == "make plan MODEL=m" and Question("m").arguments == [
        "plan",
        "--model",
        "m",
        "--json",
    ]


def test_an_answer_is_kept(planners):
    planner, question = planners(ECHO), Question("m", "g", 1, "lora")
    assert isinstance(planner.ask(question), Waiting)
    answer = answer_of(planner, question)
    assert answer.tree["words"] == question.arguments and planner.ask(question) is answer


def test_one_plan_at_a_time_and_few_wait(planners):
    planner = planners(SLEEP)
    found = [planner.ask(Question(f"m{number}")) for number in range(4)]
    assert [waiting.ahead for waiting in found] == [0, 1, 2, 3]
    with pytest.raises(Busy):
        planner.ask(Question("m4"))
    assert planner.ask(Question("m1")).ahead == 1
    deadline = time.monotonic() + 5
    while not (running := children()):
        assert time.monotonic() < deadline
    assert len(running) == 1
    planner.close()
    assert children() == []


def children() -> list[psutil.Process]:
    """Processes that run a planner's script; a worker of the test suite may have others from earlier tests."""
    return [child for child in psutil.Process().children() if runs(child, SLEEP)]


def runs(process: psutil.Process, text: str) -> bool:
    try:
        return text in process.cmdline()  # that of a zombie is empty
    except psutil.NoSuchProcess:
        return False


def test_a_plan_that_takes_too_long_is_ended(planners):
    answer = answer_of(planners(SLEEP, limit_s=0.3), Question("m"))
    assert "no plan was found" in answer.problem and children() == []


def test_the_reason_that_there_is_no_plan_is_told(planners):
    text = "import sys; sys.stderr.write('error: it does not fit\\nuse two GPUs\\n'); sys.exit(4)"
    assert answer_of(planners(text), Question("m")) == Answer(problem="it does not fit\nuse two GPUs")
    assert answer_of(planners("print('no JSON')"), Question("m")).problem == "it ended with 0"


def page(planner, tmp_path, query: str, **headers) -> tuple[int, str]:
    answer = Client(Studio(tmp_path, planner)).get(f"/plan{query}", headers=headers)
    return answer.status_code, answer.text


def test_the_form_lists_shipped_models_and_gpus(planners, tmp_path):
    code, text = page(planners(SLEEP), tmp_path, "")
    assert code == 200 and "data-seconds" not in text
    for choice in ("Qwen/Qwen3-8B", "NVIDIA GeForce RTX 4090", "qlora", "64"):
        assert f'<option value="{choice}"' in text
    assert children() == []


def test_a_page_says_that_a_plan_is_being_made_and_asks_again(planners, tmp_path):
    planner = planners(SLEEP)
    code, text = page(planner, tmp_path, f"?{FORM}")
    assert code == 200 and "Planning" in text and 'data-seconds="2"' in text
    assert '<option value="qlora" selected>' in text and '<progress class="share"' in text
    page(planner, tmp_path, f"?{FORM.replace('gpus=1', 'gpus=2')}")
    assert "1 other plan first." in page(planner, tmp_path, f"?{FORM.replace('gpus=1', 'gpus=2')}")[1]


@pytest.mark.parametrize(
    "wrong",
    ["gpu=abacus", "gpus=3", "gpus=-1", "method=magic", "other=1"],
)
def test_only_choices_of_the_form_are_taken(planners, tmp_path, wrong):
    code, text = page(planners(SLEEP), tmp_path, f"?{FORM}&{wrong}" if "other" in wrong else f"?{wrong}")
    assert code == 400 and "The plan explorer has no choice" in text and children() == []


@pytest.mark.parametrize(
    "wrong",
    [
        "model=../x",
        "model=.",
        "model=",
        "model=qwen",
        "rows=-1",
        "rows=--help",
        "rows=1,000",
        "price=x",
        "context=1e5",
    ],
)
def test_what_was_typed_wrong_stays_in_the_form_and_is_said_there(planners, tmp_path, wrong):
    field, _, value = wrong.partition("=")
    code, text = page(planners(SLEEP), tmp_path, f"?{wrong}&gpu=NVIDIA+L4")
    assert code == 200 and f'name="{field}"' in text and f'value="{value}"' in text and children() == []
    said = {"model": "is not in the list", "rows": "Rows: ", "price": "Price of a GPU hour: "}
    assert said.get(field, "Tokens of the longest row: ") in text.partition('class="warning')[2]
    assert '<option value="NVIDIA L4" selected>' in text


def test_a_part_of_a_name_is_enough_if_one_model_has_it(planners, tmp_path):
    planner = planners("import sys; sys.exit(str(sys.argv[1:]))")
    question = Question("Qwen/Qwen3-8B", "NVIDIA L4", 1, "lora", rows="50", tokens="9", price="0.5")
    answer_of(planner, question)
    form = "gpu=NVIDIA+L4&gpus=1&method=lora&rows=50&tokens=9&price=0.5&context="
    assert "--gpu-hour&#39;, &#39;0.5" in page(planner, tmp_path, f"?model=qwen3-8b&{form}")[1]
    assert "--gpu-hour&#39;, &#39;0.5" in page(planner, tmp_path, f"?model=+QWEN3-8b+&{form}")[1]


def test_a_name_means_what_it_means_to_make_plan(planners, tmp_path):
    text = page(planners(SLEEP), tmp_path, "?model=qwen3-vl-8b")[1]
    assert f'value="{hub_name("qwen3-vl-8b")}"' in text and "Planning" in text


def test_a_single_gpu_takes_a_single_method(planners, tmp_path):
    code, text = page(planners(SLEEP), tmp_path, f"?{FORM.replace('qlora', '')}")
    assert code == 200 and "choose one of them" in text and children() == []


def test_other_sites_start_no_plans(planners, tmp_path):
    for site in ("cross-site", "same-site"):
        code, text = page(planners(SLEEP), tmp_path, f"?{FORM}", **{"Sec-Fetch-Site": site})
        assert code == 403 and "Another site" in text
    assert children() == []


def test_a_problem_is_shown_with_the_command(planners, tmp_path):
    planner = planners("import sys; sys.exit('error: <b>nothing</b> fits')")
    answer_of(planner, Question("Qwen/Qwen3-8B", "NVIDIA GeForce RTX 4090", 1, "qlora"))
    code, text = page(planner, tmp_path, f"?{FORM}")
    assert code == 200 and "&lt;b&gt;nothing&lt;/b&gt; fits" in text and "make plan MODEL=" in text
    assert "data-seconds" not in text
