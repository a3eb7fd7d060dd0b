"""Long text in sections, so that neither reading nor tokenizing needs memory for all of it."""

from collections.abc import Iterable, Iterator

SECTION_CHARACTERS = 1 << 15


def sections(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Text that comes in blocks, in sections, each with whether it is the last; blank ones are left out.

    A section ends at a line break, or at a space if a line is longer than a section.
    """
    held = None
    for section in _cut(blocks):
        if section.strip():
            if held is not None:
                yield held, False
            held = section
    if held is not None:
        yield held, True


def _cut(blocks: Iterable[str]) -> Iterator[str]:
    text = ""
    for block in blocks:
        text += block
        while len(text) > SECTION_CHARACTERS:
            end = text.rfind("\n", 0, SECTION_CHARACTERS) + 1 or text.rfind(" ", 1, SECTION_CHARACTERS)
            end = end if end > 0 else SECTION_CHARACTERS
            yield text[:end]
            text = text[end:]
    yield text
