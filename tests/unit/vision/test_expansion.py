"""Tokens of rows with pictures: those of the models' own processors, with loss on answers alone."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import transformers
from transformers import Gemma3Processor, Idefics3Processor

from sft_play.data.chat import make_chat, with_control_tokens
from sft_play.data.template import use_template
from sft_play.data.tokens import encode, prompt_ids
from sft_play.errors import DataError
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation
from sft_play.rows.images import MARK
from sft_play.vision.expansion import cut_before
from sft_play.vision.families import TEXT_ALONE
from sft_play.vision.parts import for_template, takes
from sft_play.vision.types import Picture
from tests.packages import needs_tiles
from tests.pictures import WORDS, drawn, recipe_of, tokenizer_of

SIZES = [(50, 90), (300, 90), (64, 64), (200, 140)]


def chat_of(kind, **settings):
    tokenizer = tokenizer_of(kind)
    return replace(make_chat(tokenizer, "assistant", **settings), recipe=recipe_of(kind, tokenizer))


def picture(chat, size):
    return Picture(f"{size}.png", 1, *size, chat.recipe.family.fit(*size))


def user(chat, content, *sizes):
    images = [asdict(picture(chat, size)) for size in sizes]
    return (
        {"role": "user", "content": content, "images": images}
        if images
        else {"role": "user", "content": content}
    )


def answered(text):
    return {"role": "assistant", "content": text}


def talk(chat):
    """Two questions with pictures, before, in and after texts."""
    return Conversation(
        (
            user(chat, f"{MARK}What is it?", SIZES[0]),
            answered("It is a cat."),
            user(chat, f"user\n{MARK}{MARK} And\n{MARK}", *SIZES[1:]),
            answered("What?"),
        ),
        source="rows.jsonl:1",
    )


def by_the_processor(chat, conversation):
    """Ids as the model's own processor makes them of the rendered conversation and real pictures."""
    settings = json.loads(chat.recipe.settings)
    images = getattr(transformers, chat.recipe.processor)(**settings)
    messages = for_template(conversation.messages, chat.tokenizer.chat_template)
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False)
    pictures = [drawn(*size) for size in SIZES]
    family = chat.recipe.family
    if chat.recipe.processor.startswith("Gemma"):
        processor = Gemma3Processor(images, chat.tokenizer, image_seq_length=family.tokens)
    elif chat.recipe.processor.startswith("Qwen"):  # its processor needs torchvision, for videos
        for grid in images(images=pictures)["image_grid_thw"]:
            text = text.replace(family.image, "<image>" * int(grid.prod() // 4), 1)
        return chat.tokenizer(text.replace("<image>", family.image), add_special_tokens=False)["input_ids"]
    else:
        processor = Idefics3Processor(images, chat.tokenizer, image_seq_len=family.tokens)
    return processor(text=[text], images=[pictures], add_special_tokens=False)["input_ids"][0]


@pytest.mark.parametrize("kind", WORDS)
def test_ids_are_those_of_the_models_own_processor(kind):
    chat = chat_of(kind)
    ((row,),) = encode(chat, [talk(chat)])
    expected = by_the_processor(chat, talk(chat))
    assert row.input_ids.tolist() == list(expected)[: len(row.input_ids)]
    assert len(expected) - len(row.input_ids) <= 1  # a line break behind the last turn
    assert (row.input_ids == chat.recipe.image_token_id).sum() == sum(one.fit.tokens for one in row.pictures)
    assert [(one.height, one.width) for one in row.pictures] == SIZES


@pytest.mark.parametrize("kind", WORDS)
def test_where_pictures_begin_is_known_if_memory_depends_on_it(kind):
    chat = chat_of(kind)
    ((row,),) = encode(chat, [talk(chat)])
    begins = np.flatnonzero(np.diff((row.input_ids == chat.recipe.image_token_id).astype(int), prepend=0) > 0)
    expected = begins.tolist() if kind == "gemma" else [0] * len(SIZES)
    assert [one.fit.begin for one in row.pictures] == expected


@pytest.mark.parametrize("kind", WORDS)
def test_loss_is_on_the_answers_alone(kind):
    chat = chat_of(kind)
    ((row,),) = encode(chat, [talk(chat)])
    learned = chat.tokenizer.decode(row.input_ids[row.labels != IGNORED])
    assert learned.replace(" ", "").startswith("Itisacat.") and "What?" in learned
    assert not (row.labels == chat.recipe.image_token_id).any()


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("template", ["auto", "plain", "chatml"])
def test_a_prompt_is_how_the_row_begins(kind, template):
    chat = chat_of(kind)
    if template == "chatml" and kind != "qwen":
        chat.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    use_template(chat.tokenizer, template)
    ((row,),) = encode(chat, [talk(chat)])
    prompt = prompt_ids(chat, Conversation(talk(chat).messages[:3], source="prompt"))
    assert prompt == row.input_ids[: len(prompt)].tolist()
    assert (row.labels[len(prompt) :] != IGNORED).all()
    assert prompt.count(chat.recipe.image_token_id) == sum(one.fit.tokens for one in row.pictures)


def test_templates_without_images_get_what_stands_around_them():
    chat = chat_of("qwen")
    use_template(chat.tokenizer, "plain")
    ((row,),) = encode(chat, [talk(chat)])
    text = chat.tokenizer.decode(row.input_ids)
    assert (
        text.count("<|vision_start|><|image_pad|>") == text.count("<|image_pad|><|vision_end|>") == len(SIZES)
    )


def test_what_templates_take():
    assert takes(WORDS["qwen"][0]) == takes(WORDS["gemma"][0]) == (True, True)
    of_parts = "{% for m in messages %}{% for part in m.content if part.type != 'image' %}{{ part.text }}"
    assert takes(of_parts + "{% endfor %}{% endfor %}") == (False, True)  # SmolVLM's before transformers 5.24
    assert takes("{% for m in messages %}{{ m.content }}{% endfor %}") == (True, False)
    assert takes("{# image #}{% for m in messages %}{{ m.content }}{% endfor %}") == (True, False)
    assert takes("image {{ raise_exception('no') }}") == (True, False)


@needs_tiles
def test_rows_of_text_alone_are_rendered_too_by_a_template_that_takes_parts_alone():
    chat = chat_of("smolvlm")
    ((row,),) = encode(chat, [Conversation(({"role": "user", "content": "user"}, answered("model")))])
    assert chat.tokenizer.decode(row.input_ids) == (
        "<|im_start|>User: user<end_of_utterance>\nAssistant: model<end_of_utterance>"
    )


def test_pictures_after_the_last_answer_are_not_in_the_row():
    chat = chat_of("qwen")
    more = Conversation((*talk(chat).messages, user(chat, MARK, (64, 64))), source="rows.jsonl:1")
    ((row,),) = encode(chat, [more])
    assert len(row.pictures) == len(SIZES)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen", "<|image_pad|>"),
        ("gemma", "<image_soft_token>"),
        ("gemma", "<start_of_image>"),
        ("smolvlm", "<image>"),
    ],
)
@pytest.mark.parametrize("pictures", [0, 1])
def test_an_image_token_in_a_text_is_an_error_or_spelled(kind, text, pictures):
    chat = chat_of(kind)
    question = user(chat, f"{MARK * pictures}What is {text}?", *SIZES[:pictures])
    row = Conversation((question, answered("It is a cat.")), source="rows.jsonl:7")
    with pytest.raises(DataError, match=r"^rows.jsonl:7: .*no text may have"):
        encode(chat, [row])
    ((spelled,),) = encode(with_control_tokens(chat, "escape"), [row])
    count = sum(one.fit.tokens for one in spelled.pictures)
    assert (spelled.input_ids == chat.recipe.image_token_id).sum() == count
    assert text in chat.tokenizer.decode(spelled.input_ids)


def test_an_image_token_in_plain_text_is_an_error():
    chat = chat_of("qwen")
    with pytest.raises(DataError, match=r"^a.txt:1: .*no text may have"):
        encode(chat, [Conversation((), text="It is <|image_pad|>.", source="a.txt:1")])


def test_pictures_for_a_model_that_takes_none_are_never_left_out():
    chat = chat_of("qwen")
    rows = [talk(chat)]
    with pytest.raises(DataError, match="^rows.*: this model learns from text alone"):
        encode(replace(chat, recipe=TEXT_ALONE), rows)


def test_a_template_that_loses_a_picture_is_an_error():
    chat = chat_of("qwen")
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(
        "{%- if part.type", "{%- if loop.index > 1 and part.type"
    )
    with pytest.raises(DataError, match="has 3 places for images .* and the row has 4 images"):
        encode(chat, [talk(chat)])


@pytest.mark.parametrize("kind", WORDS)
def test_a_row_is_never_cut_within_a_picture(kind):
    chat = chat_of(kind)
    ((row,),) = encode(chat, [talk(chat)])
    places = np.flatnonzero(row.input_ids == chat.recipe.image_token_id)
    for limit in range(1, len(row.input_ids) + 1):
        end, pictures = cut_before(chat.recipe, row.input_ids, row.pictures, limit)
        assert end <= limit and (places < end).sum() == sum(one.fit.tokens for one in pictures)
        assert pictures == row.pictures[: len(pictures)]
        if limit < len(row.input_ids) and row.input_ids[limit] != chat.recipe.image_token_id:
            assert end == limit or kind != "qwen"  # a text is cut where the limit is


def test_rows_far_too_long_keep_the_pictures_of_their_beginning():
    chat = chat_of("qwen", max_tokens=40)
    long = user(chat, f"{MARK}{'What is it? ' * 5000}{MARK}", SIZES[0], SIZES[1])
    ((row,),) = encode(chat, [Conversation((long, answered("It is a cat.")), source="rows.jsonl:1")])
    assert len(row.input_ids) > 40
    assert cut_before(chat.recipe, row.input_ids, row.pictures, len(row.input_ids))[1] == row.pictures[:1]
