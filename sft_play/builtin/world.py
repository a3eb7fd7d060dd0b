"""The synthetic data of the demo: a shop's diary (plain text to pretrain on) and its orders (the LoRA task).

The diary records who bought what and where it went. A page states six facts once and then repeats them, so a
base model that is pretrained on it learns to copy facts from the context, and that eleven is 11. It has seen
notes of a single fact ("Note the city: Oslo."), but never a letter, a whole answer or a chat.

An order is a short letter; the answer is the same order as one machine-readable line:

    user       Hi, my name is Leo. I would like nine white tables, delivered to Sydney on Monday.
    assistant  name: Leo | city: Sydney | item: table | colour: white | count: 9 | day: Monday

Some letters also mention a distractor: a colour, a city or a day that is not part of the order ("the red ones
were sold out"). Held-out orders are new by construction: a fifth of all pairs of item and colour is excluded
from the training rows, and validation and test rows use only those. So no answer can be memorized; it has to
be read from the letter.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tara "
    "Viktor"
)
CITIES = _words(
    "Athens Berlin Cairo Dublin Geneva Hamburg Istanbul Kyoto Lisbon Madrid Naples Oslo Paris Quito Rome "
    "Sydney Toronto Vienna Warsaw Zurich"
)
ITEMS = _words(
    "basket blanket bottle bucket candle carpet chair clock kettle ladder lamp mirror pillow table teapot "
    "vase"
)
COLOURS = _words("black blue green orange purple red white yellow")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NUMBER_WORDS = _words("two three four five six seven eight nine ten eleven twelve")
NUMBERS = {word: count for count, word in enumerate(_NUMBER_WORDS, start=2)}

NEWS = (
    "On {day} {name} from {city} bought {word} {colour} {item}s.",
    "We sold {word} {colour} {item}s to {name} on {day}, and the van took them to {city}.",
    "A letter from {city} came on {day}: {name} asks for {word} {item}s, all of them {colour}.",
    "There were {word} {colour} {item}s in the van to {city}, which {name} had paid for on {day}.",
    "Our customer {name} lives in {city}, came into the shop on {day} and took {word} {item}s in {colour}.",
    "In {city} it rained on {day}, but {name} was happy with the {word} {colour} {item}s.",
)
DETAILS = (
    "The name of the customer is {name}, and {name} lives in {city}.",
    "The city is {city} and the day was {day}.",
    "The item is the {item}, and the colour of every {item} is {colour}.",
    "The count of the {item}s for {name} is {count}.",
    "On {day} all {count} {colour} {item}s were packed for {city}.",
    "It had to be {colour} ones, for {name} likes {colour}.",
    "In {city} people like {colour} {item}s.",
    "The {colour} {item}s for {name} were {word}, that is {count}.",
    "By {day} they had {count} {colour} {item}s in {city}.",
    "On {day} the road to {city} was free, and {day} is a good day for a van.",
    "For {word} {item}s we need {count} boxes, and {name} had {count}.",
    "From {city} we heard on {day} that {name} likes the {item}s.",
)
NOTES = (
    "Note the name: {name}.",
    "Note the city: {city}.",
    "Note the item: {item}.",
    "Note the colour: {colour}.",
    "Note the count: {count}.",
    "Note the day: {day}.",
    "In the book: {name} | {city}.",
    "In the book: {day} | {count}.",
    "In the book: {colour} | {item}.",
)

ORDERS = (
    "Hello, this is {name} from {city}. Please send me {word} {colour} {item}s by {day}.",
    "Hi, my name is {name}. I would like {word} {colour} {item}s, delivered to {city} on {day}.",
    "Good morning! Could you bring {word} {colour} {item}s to {city} before {day}? The order is for {name}.",
    "I need {word} {colour} {item}s on {day}. Please ship them to {name} in {city}.",
    "Can {name} in {city} have {word} {colour} {item}s by {day}, please?",
    "We have no {item}s left! Please send {word} {colour} ones to {city} on {day} and ask for {name}.",
    "By {day} I need {word} {item}s in {city}, all of them {colour}. Thank you, {name}.",
    (
        "Dear shop, {word} {colour} {item}s for {name}, please. "
        "The address is in {city}, and {day} would be fine."
    ),
    "On {day} my friend {name} moves to {city}. Please send {word} {colour} {item}s as a present.",
    (
        "Last time the {other_colour} {item}s were sold out. "
        "Now I want {word} {colour} ones in {city} by {day}. Yours, {name}."
    ),
    "Not {other_colour}, please: I want {word} {colour} {item}s. Send them to {name} in {city} on {day}.",
    (
        "I no longer live in {other_city}. "
        "Please bring {word} {colour} {item}s to {city} on {day}. Best wishes, {name}."
    ),
    (
        "I cannot be at home on {other_day}, so {day} is better. "
        "It is {word} {colour} {item}s for {name} in {city}."
    ),
)
ANSWER = "name: {name} | city: {city} | item: {item} | colour: {colour} | count: {count} | day: {day}"

PAIRS = tuple(itertools.product(ITEMS, COLOURS))
HELD_OUT_ONE_IN = 5  # one in this many pairs of item and colour is reserved for held-out rows

WORD = re.compile(r"\w+")


def _facts(rng: random.Random, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The facts of a diary page or an order, and the distractors that a letter can mention."""
    item, colour = rng.choice(pairs)
    word = rng.choice(list(NUMBERS))
    city, other_city = rng.sample(CITIES, 2)
    day, other_day = rng.sample(DAYS, 2)
    return {
        "name": rng.choice(NAMES),
        "city": city,
        "item": item,
        "colour": colour,
        "count": str(NUMBERS[word]),
        "word": word,
        "day": day,
        "other_city": other_city,
        "other_colour": rng.choice([other for other in COLOURS if other != colour]),
        "other_day": other_day,
    }


def diary_pages(seed: int, pages: int) -> list[str]:
    """Plain-text pages about the shop: one customer and one delivery each, in five to nine sentences."""
    rng = random.Random(f"diary/{seed}")
    texts = []
    for _ in range(pages):
        rest = rng.sample(DETAILS, rng.randint(3, 5)) + rng.sample(NOTES, rng.randint(1, 3))
        sentences = [rng.choice(NEWS), *rng.sample(rest, len(rest))]
        facts = _facts(rng, PAIRS)
        texts.append(" ".join(sentence.format(**facts) for sentence in sentences))
    return texts


def order_line(facts: Mapping[str, str]) -> str:
    """The answer of the demo."""
    return ANSWER.format_map(facts)


def _orders(
    rng: random.Random, pairs: Sequence[tuple[str, str]], answered: Callable[[Mapping[str, str]], str]
) -> Iterator[tuple[str, str]]:
    """An endless stream of letters and answers without duplicates."""
    seen = set()
    while True:
        facts = _facts(rng, pairs)
        letter, answer = rng.choice(ORDERS).format(**facts), answered(facts)
        if answer not in seen:
            seen.add(answer)
            yield letter, answer


def order_rows(
    seed: int, rows: dict[str, int], answered: Callable[[Mapping[str, str]], str] = order_line
) -> dict[str, list[dict]]:
    """Rows in the messages format, orders and what is `answered` to their facts.

    `rows` is the number of rows per split, "train" or a held-out one.
    """
    rng = random.Random(f"orders/{seed}")
    shuffled = rng.sample(PAIRS, len(PAIRS))
    held_out = shuffled[: len(PAIRS) // HELD_OUT_ONE_IN]
    train = _orders(rng, shuffled[len(held_out) :], answered)
    # one stream for all held-out splits, so that they do not overlap
    others = _orders(rng, held_out, answered)
    splits: dict[str, list[dict]] = {}
    for split, count in rows.items():
        orders = itertools.islice(train if split == "train" else others, count)
        splits[split] = [
            {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": answer}]}
            for letter, answer in orders
        ]
    return splits


def unknown_words(text: str) -> list[str]:
    """The words of a text, each once, that are in no letter, whatever the case of their characters."""
    values = [*NAMES, *CITIES, *ITEMS, *(f"{item}s" for item in ITEMS), *COLOURS, *DAYS, *NUMBERS]
    sentences = [re.sub(r"\{.*?\}s?", "", order) for order in ORDERS]
    known = {word.lower() for part in [*values, *sentences] for word in WORD.findall(part)}
    return [word for word in dict.fromkeys(WORD.findall(text)) if word.lower() not in known]
