"""Letters to the demo's shop, and the replies in its house style: what a real model learns in minutes.

A reply is determined by its letter: it names what was ordered, where it goes and when, says how to look after
it, and has the same headings, sentences and signature each time. No model can guess those; each is shown
hundreds of times in training. Held-out letters are for pairs of item and colour that no training letter has
(builtin/world.py).
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

CARE = {
    "basket": "Brush them once a week and never leave them in the rain, because wet straw breaks.",
    "blanket": "Air them at an open window in the morning, and wash them by hand with cold water.",
    "bottle": "Rinse them with warm water and a little salt, and dry them upside down.",
    "bucket": "Empty them before the frost comes, because ice splits the bottom.",
    "candle": "Cut the wick short each time, and keep them out of the draught.",
    "carpet": "Beat them outside on a dry day, and turn them around twice a year.",
    "chair": "Tighten the screws after the first month, and put felt under the legs.",
    "clock": "Wind them every Sunday evening, and never turn the hands back.",
    "kettle": "Boil them out with vinegar once a month, and leave the lid open afterwards.",
    "ladder": "Store them lying down in a dry room, and oil the hinges in spring.",
    "lamp": "Wipe the shade with a dry brush, and pull the plug before you change the bulb.",
    "mirror": "Clean them with warm water and old newspaper, and hang them away from steam.",
    "pillow": "Shake them out every morning, and let them lie in the shade to air.",
    "table": "Wipe up water at once, and rub the wood with oil before winter.",
    "teapot": "Rinse them with clear water only, because soap spoils the taste of the tea.",
    "vase": "Change the water every second day, and clean the neck with rice and salt.",
}
PAINT = {
    "black": "Black shows every bit of dust, so keep a soft cloth at hand.",
    "blue": "Our blue comes from a dyer in the next village, and it does not fade.",
    "green": "The green is mixed by hand, so no two of them are quite alike.",
    "orange": "Orange pales in strong sun, so choose a place in the shade.",
    "purple": "The purple may rub off a little during the first week.",
    "red": "The red grows darker with the years, and we think that it grows better too.",
    "white": "White turns yellow near smoke, so keep them away from the stove.",
    "yellow": "The yellow is the brightest that we have, and it stays that way.",
}
BY_SHIP = ("Cairo", "Istanbul", "Kyoto", "Quito", "Sydney", "Toronto")
SHIP = "They travel by ship, and a driver brings them from the port to your door."
VAN = "Our own van brings them, and the driver rings the bell before noon."

LETTER = """Dear {name},

thank you for your letter. We have written your order in our book and put the {item}s \
aside, so that nobody else can buy them.

WHAT YOU ORDERED
{word} {item}s, all of them {colour}

WHERE AND WHEN
to {city}, on {day}
{way}

HOW TO LOOK AFTER THEM
{care} {paint}

HOW TO PAY
The bill is in the box. Pay once you have looked at the {item}s: by cheque, or to the driver, \
who gives you a receipt.

IF SOMETHING IS WRONG
Keep the box and write to us within two weeks. We collect the {item}s at our own cost, and you need not \
give a reason.

With kind regards from the harbour,
Ida Holm
The Lamp and Ladder"""

ORDER = ("name", "item", "word", "colour", "city", "day")  # what a reply takes from its letter


def reply(facts: Mapping[str, str]) -> str:
    """The reply to the letter with these facts of an order (builtin/world.py)."""
    way = SHIP if facts["city"] in BY_SHIP else VAN
    return LETTER.format_map(
        {**facts, "way": way, "care": CARE[facts["item"]], "paint": PAINT[facts["colour"]]}
    )


def house_style(answer: str, reference: str, row: Mapping[str, Any]) -> bool:
    """Whether an answer is a letter in the house style, whatever it says about the order."""
    return _style().fullmatch(answer.strip()) is not None


def right_order(answer: str, reference: str, row: Mapping[str, Any]) -> bool:
    """Whether it is one, and names the customer, goods, city and day of the reference."""
    found, wanted = (_style().fullmatch(text.strip()) for text in (answer, reference))
    return found is not None and wanted is not None and found.group(*ORDER) == wanted.group(*ORDER)


@cache
def _style() -> re.Pattern[str]:
    """The letter, with a word for each part of the order, the same each time, and any text for the rest."""
    texts_and_names = re.split(r"\{(\w+)\}", LETTER)
    pattern, seen = "", set()
    for text, name in zip(texts_and_names[::2], [*texts_and_names[1::2], None], strict=True):
        pattern += re.escape(text)
        if name in seen:
            pattern += f"(?P={name})"
        elif name is not None:
            pattern += rf"(?P<{name}>\w+)" if name in ORDER else r"[^\n]+"
            seen.add(name)
    return re.compile(pattern)
