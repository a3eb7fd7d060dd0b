"""Keeps access tokens, and passwords in addresses, out of configs, logs, results and messages.

A token is recognized by its form, or by its value if the environment holds it under a name such as HF_TOKEN.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|wandb_v\d_[A-Za-z0-9_]{20,}"
    r"|sk-(?:[a-z0-9]+-)*[A-Za-z0-9_]{20,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}"
    r"|AKIA[0-9A-Z]{16}"  # AWS
    r")"
)
# In an address: the password before an @, or what stands there alone, and signatures and tokens in the query.
# One that was taken for a path has a single slash. Quotes end it, so that JSON stays JSON. The group before
# the secret is what stays.
ADDRESSES = re.compile(
    r"(?i)(:/{1,2}[^\s/?#:@\"<>]*:)([^\s/?#\"<>]+)(?=@)"
    r"|(\bhttps?:/{1,2})([^\s/?#:@\"<>]+)(?=@)"
    r"|([?&](?:[\w-]*(?:token|signature|secret|password|api_?key)|sig)=)([^\s&#\"<>]+)"
)
SECRET_NAMES = re.compile(r"(?:^|_)(?:TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)$")
MIN_LENGTH = 8  # a shorter value in the environment would also match ordinary text
MASK = "*"


def _values(environment: Mapping[str, str]) -> dict[str, str]:
    """Values of secret variables, with their names; the longest first, since one may contain another."""
    found = {
        value: name
        for name, value in environment.items()
        if SECRET_NAMES.search(name) and len(value) >= MIN_LENGTH
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def find_secret(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """What the first secret in `text` is, without showing it; None if there is none."""
    for value, name in _values(environment).items():
        if value in text:
            return f"the value of {name}"
    if form := FORMS.search(text):
        return f"an access token ({form[0][:3]}...)"
    return "a password or a token in an address" if ADDRESSES.search(text) else None


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` with each secret replaced by as many asterisks as it has bytes."""
    for value in _values(environment):
        text = text.replace(value, _masked(value))
    text = FORMS.sub(lambda found: _masked(found[0]), text)
    return ADDRESSES.sub(_mask_last_group, text)


def _mask_last_group(found: re.Match[str]) -> str:
    last = found.lastindex or 0  # of the alternative that matched
    return found[last - 1] + _masked(found[last])


def _masked(secret: str) -> str:
    return MASK * len(secret.encode("utf-8", "surrogateescape"))


def redact_file(path: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Overwrites each secret in a log with asterisks, in place, so that whoever appends to it can go on.

    Secrets that span lines are not found.
    """
    secrets = {name: value for value, name in _values(environment).items()}  # once, not for each line
    try:
        with path.open("r+b") as file:
            while line := file.readline():
                text = line.decode("utf-8", "surrogateescape")
                clean = redact(text, secrets).encode("utf-8", "surrogateescape")
                if clean != line and len(clean) == len(line):
                    file.seek(-len(line), os.SEEK_CUR)
                    file.write(clean)
    except OSError:
        return  # a log that cannot be read has nothing to show either
