"""Publishes a finished run on the Hugging Face Hub: the files that loading it needs, and nothing else."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.commands.merge import merged_folder
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, first_line
from sft_play.hub import access_token
from sft_play.manifest import CARD
from sft_play.model.weights.finished import finished_weights
from sft_play.report.card import public_name, write_card
from sft_play.runlog import RunDir
from sft_play.secrets import find_secret
from sft_play.spelling import login, var
from sft_play.ui.console import console, quiet_libraries
from sft_play.ui.progress import spinner
from sft_play.units import counted, format_bytes
from sft_play.upstream.huggingface_hub import is_network_error, limit_network, without_xet

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

ADAPTER_SETTINGS = "adapter_config.json"
PUBLISHED = (
    CARD,
    ADAPTER_SETTINGS,
    "adapter_model*.safetensors",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# too large to search for secrets, and full of words that may be somebody's password
NOT_SEARCHED = ("*.safetensors", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
MESSAGE_CHARACTERS = 300  # of what the Hub answered


def push(
    config: RunConfig, run: RunDir, repository: str, *, part: str = "result", public: bool = False
) -> dict[str, object]:
    """Uploads what was trained ("result"), or what `make merge` wrote ("merged"), in one commit.

    The repository, user/name, is made if it does not exist, public or private; an existing one keeps what it
    is.

    Raises:
        ConfigError: there is no token, the repository cannot be written or is public without `public`, a file
            has a secret in it, or the Hub cannot be reached; then nothing has been published.
        CheckpointError: the run has no complete weights, or they are damaged.
    """
    token = access_token(repository)
    weights = finished_weights(config, run)
    folder = merged_folder(config, run, weights) if part == "merged" else weights
    if not (folder / CARD).exists():
        write_card(config, run, folder, merged=part == "merged")
    files = sorted({path for name in PUBLISHED for path in folder.glob(name)})
    contents = {path.name: _content(path) for path in files}
    size = format_bytes(sum(path.stat().st_size for path in files))
    with quiet_libraries(run.log), spinner(f"uploading {size} to {repository}"):
        url, private = _upload(repository, contents, token, public=public, title=config.output.name)
    kind = "private" if private else "public"
    console().print(f"pushed {counted(len(files), 'file')} ({size}): {url} ({kind})")
    return {"url": url, "private": private, "files": sorted(contents)}


def _content(path: Path) -> bytes | Path:
    """What to upload of a file: itself, or its text without our folders; ConfigError if it has a secret."""
    if any(fnmatch(path.name, name) for name in NOT_SEARCHED):
        return path
    text = path.read_text(encoding="utf-8", errors="replace")
    secret = find_secret(text)
    if secret:
        raise ConfigError(f"{path} contains {secret}, which would be published; remove it and push again")
    if path.name != ADAPTER_SETTINGS:
        return path
    settings = json.loads(text)
    base = settings.get("base_model_name_or_path")
    return json.dumps({**settings, "base_model_name_or_path": base and public_name(base)}, indent=2).encode()


def _upload(
    repository: str, contents: dict[str, bytes | Path], token: str, *, public: bool, title: str
) -> tuple[str, bool]:
    """The address of the repository, and whether it is private."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    limit_network()
    api = HfApi(token=token)
    try:
        private = _prepare(api, repository, public=public)
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        with without_xet():
            api.create_commit(repository, operations, commit_message=f"{title}, trained with SFT-Play")
    except HfHubHTTPError as error:
        raise ConfigError(f"{var(REPO=repository)}: {_refusal(error)}. Nothing was published") from error
    except ValueError as error:  # the client has the Hub check the metadata of the card
        if CARD not in str(error):
            raise
        raise ConfigError(
            f"{var(REPO=repository)}: {error}. Nothing was published; correct {CARD}"
        ) from error
    except Exception as error:
        if not (isinstance(error, OfflineModeIsEnabled) or is_network_error(error)):
            raise
        reason = first_line(error)[:MESSAGE_CHARACTERS]
        raise ConfigError(
            f"{var(REPO=repository)}: the Hub cannot be reached ({reason}). Nothing was published; run the "
            "command again once it can be reached"
        ) from error
    return f"{api.endpoint}/{repository}", private


def _prepare(api: "HfApi", repository: str, *, public: bool) -> bool:
    """Makes the repository unless it exists; returns whether it is private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = bool(api.repo_info(repository).private)
    except RepositoryNotFoundError:
        api.create_repo(repository, private=not public)
        return not public
    if not private and not public:
        raise ConfigError(
            f"{var(REPO=repository)} exists and is public; add {var(PUBLIC=1)} to publish there"
        )
    return private


def _refusal(error: "HfHubHTTPError") -> str:
    status = error.response.status_code
    said = (error.server_message or str(error).splitlines()[0])[:MESSAGE_CHARACTERS]
    reasons = {
        401: f"the Hub does not accept the access token; run `{login()}` again, or set HF_TOKEN",
        403: "the access token has no write permission there; create one that has at "
        "https://huggingface.co/settings/tokens",
    }
    return reasons.get(status, f"the Hub answered {status}: {said}")
