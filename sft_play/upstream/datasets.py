"""What we take of the private parts of datasets."""

from typing import Any


def fingerprint(rows: Any) -> str:
    """What datasets names the content of a data set by.

    Its public way is to save it and look (5.2). What makes this unnecessary: a public name.
    """
    return rows._fingerprint
