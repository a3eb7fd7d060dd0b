"""`make dapt-docx`: a folder of documents -> a file of raw text, which data.task=cpt trains on."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from sft_play.commands.output import require_own_file
from sft_play.data.folders import TEXT_SUFFIXES, files_below
from sft_play.data.show import write_rows
from sft_play.errors import ConfigError, DataError, first_line
from sft_play.extras import install_command
from sft_play.spelling import var

# Suffix -> the module that reads such files, and the package that has it.
LIBRARIES = {".docx": ("docx", "python-docx"), ".pdf": ("pypdf", "pypdf")}
DOCUMENTS = (*LIBRARIES, *TEXT_SUFFIXES)
NO_TEXT = "it has no text (a scan?)"
NO_DOCUMENT = f"not one of {', '.join(DOCUMENTS)}"


@dataclass
class Conversion:
    """What became of the documents of a folder."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)  # file -> why it was left out


def convert_documents(folder: Path, output: Path, *, force: bool = False) -> Conversion:
    """Writes the text of each document in `folder` and below as a row with text and source.

    A document that cannot be read is left out, and said. A file with other content is replaced only with
    `force`.

    Raises:
        ConfigError: `folder` is no folder, `output` is no JSONL file or has other content, or a library is
            missing.
        DataError: no document has text; then `output` stays as it was.
        StorageError: `output` cannot be written.
    """
    if not folder.is_dir():
        raise ConfigError(f"{var(IN=folder)} is not a folder; expected one with {', '.join(DOCUMENTS)} files")
    if output.suffix != ".jsonl":
        raise ConfigError(f"{var(OUT=output)}: expected the name of a .jsonl file")
    found = files_below(folder, "IN")
    files = [path for path in found if path.suffix.lower() in DOCUMENTS and not path.is_fifo()]
    if not files:
        raise DataError(f"{var(IN=folder)} has no documents; expected {', '.join(DOCUMENTS)} files")
    _require_libraries({file.suffix.lower() for file in files})
    require_own_file(output, _is_converted, "dapt-docx", force=force)
    done = Conversion()
    rows = _rows(folder, files, done)
    first = next(rows, None)
    if first is None:
        why = "; ".join(f"{file}: {reason}" for file, reason in list(done.skipped.items())[:3])
        raise DataError(f"{var(IN=folder)}: none of {len(files)} documents could be converted ({why})")
    others = [path for path in sorted({*found} - {*files}) if path.absolute() != output.absolute()]
    write_rows(output, itertools.chain([first], rows), done.counts)
    done.skipped |= {str(path.relative_to(folder)): NO_DOCUMENT for path in others}
    return done


def _is_converted(file: Path) -> bool:
    """Whether a file begins as ours do."""
    try:
        with file.open(encoding="utf-8") as lines:
            return json.loads(lines.readline()).keys() == {"text", "source"}
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _require_libraries(suffixes: set[str]) -> None:
    needed = [LIBRARIES[suffix] for suffix in sorted(suffixes & LIBRARIES.keys())]
    missing = [package for module, package in needed if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"reading these documents needs {' and '.join(missing)} (not installed); run "
            f"`{install_command('documents')}`"
        )


def _rows(folder: Path, files: list[Path], done: Conversion) -> Iterator[dict[str, str]]:
    readers: dict[str, Callable[[Path], str]] = {".docx": _docx_text, ".pdf": _pdf_text}
    for file in files:
        name = str(file.relative_to(folder))
        try:
            text = readers.get(file.suffix.lower(), _plain_text)(file)
        except Exception as error:  # noqa: BLE001 - the libraries raise dozens of unrelated classes
            done.skipped[name] = f"it cannot be read: {first_line(error)}"
            continue
        text = text.encode("utf-8", "ignore").decode().strip()  # PDFs may have unpaired surrogates
        if text:
            yield {"text": text, "source": name}
        else:
            done.skipped[name] = NO_TEXT


def _plain_text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig")


def _docx_text(file: Path) -> str:
    """Paragraphs and tables in their order; the cells of a table row are separated by tabs."""
    import docx
    from docx.table import Table

    lines = []
    for item in docx.Document(str(file)).iter_inner_content():
        if isinstance(item, Table):
            for row in item.rows:
                lines.append("\t".join(cell.text for cell in row.cells))
        else:
            lines.append(item.text)
    return "\n".join(lines)


def _pdf_text(file: Path) -> str:
    import pypdf

    return "\n".join(page.extract_text() for page in pypdf.PdfReader(file).pages)
