import pytest

from sft_play.units import GIB, alternatives, counted, format_bytes, format_count, format_duration


def test_one_is_singular_and_all_else_is_plural():
    assert [counted(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(count, "process") for count in (1, 2)] == ["1 process", "2 processes"]


def test_alternatives_are_a_list_in_words():
    assert [alternatives(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a or b",
        "a, b or c",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5 * GIB, "5.00 GiB"),
        (1536, "1.50 KiB"),
        (3, "3 B"),
        (10**9, "953.67 MiB"),
        (1200 * GIB, "1,200.00 GiB"),
    ],
)
def test_bytes_are_labelled_in_powers_of_two(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(8_030_000_000, "8.03B"), (7473, "7.47K"), (12, "12"), (1.5e12, "1.5T")]
)
def test_counts_are_short(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.21, "4.2 s"),
        (75, "1 min 15 s"),
        (4020, "1 h 07 min"),
        (99 * 3600, "99 h 00 min"),
        (4782.6 * 3600, "199.3 days"),
        (59.99, "60.0 s"),
        (0.0786, "79 ms"),
        (0.9996, "1.0 s"),
        (0.0, "0 ms"),
    ],  # fmt: skip
)
def test_durations_read_well(value, text):
    assert format_duration(value) == text
