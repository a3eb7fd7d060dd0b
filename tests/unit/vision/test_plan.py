"""Plans for rows with images that are not here."""

from dataclasses import replace

import pytest

from sft_play.cli import parse
from sft_play.commands.plan import plan_command
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpus import detect
from sft_play.planning.allowed import allowed_plans
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.facts.architecture import Architecture
from tests.packages import needs_tiles
from tests.unit.report.test_plan import screen
from tests.vision_models import config_of

CARDS = ("--gpu", "L40S", "--gpus", "2")
IMAGES = ("--images", "2", "--pixels", "900x700")


@pytest.fixture
def plan(tmp_path):
    config_of("smolvlm").save_pretrained(tmp_path)

    def planned(*words):
        found = plan_command(parse(["plan", "--json", "--model", str(tmp_path), *CARDS, *words]))
        return found.tree, found.shown

    return planned


@pytest.mark.thorough
def test_images_that_are_not_here_are_planned_with_their_tokens_memory_and_hours(plan):
    described = ("--rows", "5000", "--tokens", "100")
    tree, report = plan(*described, *IMAGES)
    plain, _ = plan(*described)
    assert tree["memory"]["peak_bytes"] > plain["memory"]["peak_bytes"]
    assert tree["plan"]["engine"] == "ddp" and tree["plan"]["gpu_hours"] > plain["plan"]["gpu_hours"]
    text = " ".join(screen(report).split())
    assert "to the text of each row, 2 images of 900 x 700 pixels" in text
    assert [row["method"] for row in tree["methods"]] == ["full", "lora", "qlora"]


@pytest.mark.thorough
def test_the_first_plan_alone_needs_no_description_of_texts(plan):
    tree, _ = plan(*IMAGES)
    assert any("10,000 rows assumed, of 2,048 tokens" in reason for reason in tree["why"])


@needs_tiles
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.packing=true",), "train.packing=true is not supported yet for rows with images"),
        (("--context", "max"), "IMAGES and GPU_HOUR have no effect on it"),
    ],
)
def test_what_rows_with_images_are_not_trained_with_is_not_planned(plan, words, said):
    with pytest.raises(ConfigError, match=said):
        plan(*IMAGES, *words)


def test_rows_that_are_not_known_are_not_said_to_have_no_image():
    tree = {"model": {"name": "x"}, "data": {"train_path": "x"}, "tuning": {"mode": "full", "vision": "full"}}
    model, assumed = Architecture.of(config_of("smolvlm")), DataFacts.full_rows(64, 0)
    request = Request(RunConfig.model_validate(tree), model, assumed, replace(detect(), gpus=()), 1)
    assert allowed_plans(request)[0]
    with pytest.raises(ConfigError, match="no row has an image"):
        allowed_plans(replace(request, facts=replace(assumed, seen=True)))
