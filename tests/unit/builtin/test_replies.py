import pytest

from sft_play.builtin import replies, world

COUNTS = {"train": 200, "test": 24}
FACTS = {"name": "Leo", "word": "nine", "item": "table", "colour": "white", "city": "Sydney", "day": "Monday"}


@pytest.fixture(scope="module")
def rows():
    made = world.order_rows(0, COUNTS, replies.reply)
    return [[message["content"] for message in row["messages"]] for split in made.values() for row in split]


def test_every_item_and_colour_has_its_own_advice():
    assert set(replies.CARE) == set(world.ITEMS) and len(set(replies.CARE.values())) == len(world.ITEMS)
    assert set(replies.PAINT) == set(world.COLOURS) and len(set(replies.PAINT.values())) == len(world.COLOURS)
    assert set(replies.BY_SHIP) < set(world.CITIES)


def test_every_reply_is_in_the_house_style_and_says_what_its_letter_orders(rows):
    for letter, reply in rows:
        assert replies.house_style(reply, "", {}) and replies.right_order(reply, reply, {})
        found = replies._style().fullmatch(reply).group(*replies.ORDER)
        assert all(part in letter for part in found), f"{found} in {letter!r}"
    assert len({reply for _, reply in rows}) == sum(COUNTS.values())


@pytest.mark.parametrize(("part", "other"), [("name", "Anna"), ("word", "ten"), ("item", "lamp"), ("colour", "red"), ("city", "Oslo"), ("day", "Friday")])  # fmt: skip
def test_a_reply_to_another_order_is_in_the_style_and_not_right(part, other):
    reply, another = replies.reply(FACTS), replies.reply({**FACTS, part: other})
    assert replies.house_style(another, reply, {}) and not replies.right_order(another, reply, {})


def test_any_other_letter_is_not_in_the_style():
    reply = replies.reply(FACTS)
    for wrong in ("", "Dear Leo,\n\nthank you.", reply.replace("Ida Holm", "Ida Holmes"), reply + "\nP.S.",
                  reply.replace("collect the tables", "collect the lamps")):  # fmt: skip
        assert not replies.house_style(wrong, reply, {}) and not replies.right_order(wrong, reply, {})
