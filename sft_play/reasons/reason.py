"""What a reason is: facts about a plan, and the sentence that a person reads of them."""

from dataclasses import dataclass
from typing import ClassVar, dataclass_transform

from sft_play.units import format_bytes


@dataclass_transform(frozen_default=True)
class Reason:
    """One thing to know about a plan; each kind is a frozen dataclass, whose `str` is a sentence.

    The sentence has no full stop. It is `text` with the facts in their places, sizes in bytes with their
    unit, unless a kind writes it in a method.
    """

    text: ClassVar[str]

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)

    def __str__(self) -> str:
        facts = vars(self)
        sizes = {name: format_bytes(value) for name, value in facts.items() if name.endswith("bytes")}
        return self.text.format(**facts | sizes)
