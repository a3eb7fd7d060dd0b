"""The Hugging Face Hub: names of repositories, and the access token of `make push`."""

import re

from sft_play.errors import ConfigError
from sft_play.spelling import login, make, var

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def access_token(repository: str) -> str:
    """The access token of the Hub; ConfigError if REPO is wrong, or there is no token."""
    from huggingface_hub import get_token

    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(
            f"{var(REPO=repository)} is not the name of a repository; expected: {var(REPO='user/name')}"
        )
    token = get_token()
    if not token:
        raise ConfigError(
            f"{make('push')} needs a Hugging Face access token: create one with write permission at "
            f"https://huggingface.co/settings/tokens, then run `{login()}` or set HF_TOKEN"
        )
    return token
