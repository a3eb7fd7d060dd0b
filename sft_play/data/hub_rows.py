"""Rows of Hub datasets: downloaded to the Hub's cache, or read over the network if they do not fit there."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.data import Streaming
from sft_play.errors import DataError, first_line
from sft_play.ui.console import console
from sft_play.units import format_bytes
from sft_play.upstream.datasets import fingerprint
from sft_play.upstream.huggingface_hub import limit_network

if TYPE_CHECKING:
    import datasets


BATCH_ROWS = 32  # with images, which take most of their memory


@dataclass(frozen=True)
class HubRows:
    """One split of a Hub dataset."""

    name: str
    rows: "datasets.Dataset | datasets.IterableDataset"
    version: str  # changes with the rows
    count: int | None  # of rows, if it is known

    def __iter__(self) -> Iterator[dict[str, Any]]:
        read = 0
        try:
            for row in _encoded(self.rows):
                read += 1
                yield row
        except Exception as error:  # of the Hub client, which has tried again
            raise DataError(f"{self.name} cannot be read after row {read}: {first_line(error)}") from None


def _encoded(rows: Any) -> Iterator[dict[str, Any]]:
    """The rows, with the bytes of images as they are stored, which `datasets` would decode."""
    if "Image(" not in str(rows.features):
        return iter(rows)  # which decodes columns of JSON of any type
    batches = rows.with_format("arrow").iter(batch_size=BATCH_ROWS)
    return chain.from_iterable(batch.to_pylist() for batch in batches)


def load_hub_rows(
    name: str, config: str | None, key: str, streaming: Streaming = "auto"
) -> Mapping[str, HubRows]:
    """The splits of a dataset, under their names there.

    Raises:
        DataError: there is no such dataset, or it cannot be reached; names the setting `key`.
    """
    import datasets

    limit_network()
    try:
        builder = datasets.load_dataset_builder(name, config)
        streams = _is_larger_than_disk(builder, name) if streaming == "auto" else streaming
        if streams:
            loaded: Any = builder.as_streaming_dataset()
        else:
            builder.download_and_prepare()
            loaded = builder.as_dataset()
    except Exception as error:  # the Hub client raises a dozen unrelated classes
        reason = first_line(error)
        raise DataError(
            f"{key}: '{name}' is not a local file, and loading it as a Hub dataset failed: {reason}"
        ) from None
    if not streams:
        return {split: HubRows(name, rows, fingerprint(rows), len(rows)) for split, rows in loaded.items()}
    return {split: _streamed(builder, name, split, rows) for split, rows in loaded.items()}


def _streamed(
    builder: "datasets.DatasetBuilder", name: str, split: str, rows: "datasets.IterableDataset"
) -> HubRows:
    known = (builder.info.splits or {}).get(split)
    files = (builder.config.data_files or {}).get(split)
    origin = files.origin_metadata if files else builder.hash  # revisions of files, or of the repository
    return HubRows(name, rows, f"{builder.config_id} {split} {origin}", known and known.num_examples)


def _is_larger_than_disk(builder: "datasets.DatasetBuilder", name: str) -> bool:
    """Whether a dataset is not in the cache and does not fit there; says so."""
    folder = Path(builder.cache_dir)
    if folder.exists():
        return False
    needed = _bytes_needed(builder)
    free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
    if needed <= free:
        return False
    console().print(
        f"reading {name} over the network: a download takes {format_bytes(needed)} of disk, and "
        f"{format_bytes(free)} are free; data.limit reads fewer rows"
    )
    return True


def _bytes_needed(builder: "datasets.DatasetBuilder") -> int:
    """Of the files and of the Arrow files made of them: what its card says, or the files twice."""
    from fsspec.core import url_to_fs

    if builder.info.download_size and builder.info.dataset_size:
        return int(builder.info.download_size + builder.info.dataset_size)
    files = chain.from_iterable((builder.config.data_files or {}).values())
    return 2 * sum(system.size(path) or 0 for system, path in map(url_to_fs, files))
