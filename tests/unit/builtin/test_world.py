import re

import pytest

from sft_play.builtin import world

COUNTS = {"train": 2000, "val": 100, "test": 200}


@pytest.fixture(scope="module")
def rows():
    return world.order_rows(0, COUNTS)


def fields(answer: str) -> dict[str, str]:
    return dict(part.split(": ") for part in answer.split(" | "))


def test_each_split_has_as_many_rows_as_asked_for_and_a_seed_gives_the_same_ones(rows):
    assert {split: len(found) for split, found in rows.items()} == COUNTS
    assert world.order_rows(0, COUNTS) == rows
    assert world.order_rows(1, COUNTS)["test"] != rows["test"]


def test_no_answer_occurs_twice_in_all_splits(rows):
    answers = [row["messages"][1]["content"] for split in rows.values() for row in split]
    assert len(set(answers)) == len(answers) == sum(COUNTS.values())


def test_held_out_orders_are_for_goods_that_no_training_order_is_for(rows):
    def pairs(split):
        answers = (fields(row["messages"][1]["content"]) for row in rows[split])
        return {(answer["item"], answer["colour"]) for answer in answers}

    assert len(pairs("train")) > 90
    assert pairs("train").isdisjoint(pairs("val") | pairs("test"))
    assert pairs("test") | pairs("train") == set(world.PAIRS)


def test_every_answer_can_be_read_from_its_letter(rows):
    words = {str(count): word for word, count in world.NUMBERS.items()}
    for split in rows.values():
        for row in split:
            letter, answer = (message["content"] for message in row["messages"])
            order = fields(answer)
            order["count"] = words[order["count"]]
            for name, value in order.items():
                assert re.search(rf"\b{value}s?\b", letter), f"{name} of {answer!r} is not in {letter!r}"


def test_the_diary_shows_neither_an_order_nor_an_answer():
    pages = world.diary_pages(0, 2000)
    assert pages == world.diary_pages(0, 2000) and len(set(pages)) == len(pages)
    text = "\n".join(pages)
    assert not re.search(r"(?i)please|i want|i need|<\||name: \w+ \| city", text)
    for word in [*world.NAMES, *world.CITIES, *world.ITEMS, *world.COLOURS, *world.DAYS, *world.NUMBERS]:
        assert word in text


def test_words_that_are_in_no_letter_are_named(rows):
    letter = (
        "Hello, this is Lena from Lima. Please send me nine green sofas by monday, and nine more to Lima."
    )
    assert world.unknown_words(letter) == ["Lena", "Lima", "sofas", "more"]
    assert not any(
        world.unknown_words(row["messages"][0]["content"]) for split in rows.values() for row in split
    )
