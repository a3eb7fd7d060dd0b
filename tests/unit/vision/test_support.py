"""What does not go together with images is refused in a sentence that says what does."""

import pytest

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.vision.looks import TRAINED_TYPES
from sft_play.vision.recipes import KINDS
from sft_play.vision.support import require_supported


def run(**sections):
    return RunConfig.model_validate({"model": {"name": "x"}, "data": {"train_path": "x"}, **sections})


@pytest.mark.parametrize(
    ("sections", "kind", "words"),
    [
        ({"train": {"compile": True}}, "smolvlm", "train.compile=true is not supported yet .* images"),
        ({"tuning": {"mode": "qlora", "vision": "lora"}}, "smolvlm", "part of tuning.mode=lora .found"),
        ({"train": {"packing": True}}, "smolvlm", "train.packing=true is not supported yet"),
        ({"train": {"padding_free": False}}, "gemma3", "train.padding_free=false is not supported yet"),
        ({"train": {"neftune_noise_alpha": 5}}, "smolvlm", "train.neftune_noise_alpha is not supported yet"),
        ({"model": {"name": "x", "attention": "eager"}}, "smolvlm", "model.attention=eager is not"),
        ({"tuning": {"vision": "full"}}, "smolvlm", "tuning.vision=full is a part of tuning.mode=full"),
        ({"tuning": {"mode": "full", "vision": "lora"}}, "smolvlm", "part of tuning.mode=lora .found"),
    ],
)
def test_what_does_not_go_together_with_images_is_refused(sections, kind, words):
    with pytest.raises(ConfigError, match=words):
        require_supported(run(**sections), kind, seen=True)


@pytest.mark.parametrize(
    "tuning",
    [{}, {"vision": "lora"}, {"mode": "full", "vision": "full"}, {"mode": "full"}, {"mode": "qlora"}],
)
@pytest.mark.parametrize("kind", sorted(TRAINED_TYPES - {"idefics3"}))
def test_what_goes_together_is_not_refused_and_the_same_with_packing_is(tuning, kind):
    require_supported(run(tuning=tuning), kind, seen=True)
    with pytest.raises(ConfigError, match="train.packing=true is not supported yet for rows with images"):
        require_supported(run(tuning=tuning, train={"packing": True}), kind, seen=True)


def test_what_sees_is_not_trained_without_images():
    asked = run(tuning={"mode": "full", "vision": "full"})
    with pytest.raises(ConfigError, match="no row has an image.*set tuning.vision=frozen"):
        require_supported(asked, "smolvlm", seen=False)
    require_supported(run(), "gemma3", seen=False)


def test_every_model_that_learns_from_images_has_a_recipe():
    assert KINDS.keys() == TRAINED_TYPES
