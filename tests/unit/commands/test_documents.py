"""`make dapt-docx`: documents of any kind become rows of raw text."""

import json

import pytest

from sft_play.commands import documents
from sft_play.commands.documents import NO_TEXT, convert_documents
from sft_play.errors import ConfigError, DataError

INSTALL = "needs the extra `documents`: pip install python-docx pypdf"


def texts(output):
    rows = (json.loads(line) for line in output.read_text().splitlines())
    return {row["source"]: row["text"] for row in rows}


def test_text_files_become_rows_and_what_cannot_be_read_is_said(tmp_path):
    folder, output = tmp_path / "documents", tmp_path / "out" / "text.jsonl"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("# Title\n\nä text\n")
    (folder / "deep" / "b.txt").write_text("deep")
    (folder / "blank.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    done = convert_documents(folder, output)
    assert texts(output) == {"a.md": "# Title\n\nä text", "deep/b.txt": "deep"}
    assert done.counts["written"] == 2 and done.skipped["blank.txt"] == NO_TEXT
    assert "it cannot be read" in done.skipped["latin.txt"]


def test_paragraphs_and_tables_of_word_documents_keep_their_order(tmp_path):
    docx = pytest.importorskip("docx", reason=INSTALL)
    made = docx.Document()
    made.add_heading("Policy", 1)
    made.add_paragraph("First.")
    table = made.add_table(1, 2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
    made.add_paragraph("Last.")
    made.save(str(tmp_path / "policy.docx"))
    (tmp_path / "broken.docx").write_bytes(b"PK no zip")
    done = convert_documents(tmp_path, tmp_path / "text.jsonl")
    assert texts(tmp_path / "text.jsonl") == {"policy.docx": "Policy\nFirst.\nleft\tright\nLast."}
    assert list(done.skipped) == ["broken.docx"]


def pdf_of(text):
    """A PDF with one page of text, written by hand; a reader rebuilds the table of its parts."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
    parts = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 5 0 R "
        "/Resources << /Font << /F1 4 0 R >> >> >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
    ]
    body = "".join(f"{number} 0 obj\n{part}\nendobj\n" for number, part in enumerate(parts, 1))
    return f"%PDF-1.4\n{body}trailer\n<< /Root 1 0 R /Size 6 >>\nstartxref\n0\n%%EOF\n".encode()


def test_the_text_of_pdf_pages_is_taken_and_scans_are_said(tmp_path):
    pytest.importorskip("pypdf", reason=INSTALL)
    (tmp_path / "one.pdf").write_bytes(pdf_of("Hello domain."))
    (tmp_path / "scan.pdf").write_bytes(pdf_of(""))
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 cut")
    done = convert_documents(tmp_path, tmp_path / "text.jsonl")
    assert texts(tmp_path / "text.jsonl") == {"one.pdf": "Hello domain."}
    assert done.skipped["scan.pdf"] == NO_TEXT and "cannot be read" in done.skipped["broken.pdf"]


def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "a.docx").write_bytes(b"")
    monkeypatch.setattr(documents, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs python-docx \(not installed\); run .*(python-docx<|EXTRAS=documents)"
    ):
        convert_documents(tmp_path, tmp_path / "text.jsonl")


@pytest.mark.parametrize(
    ("folder", "output", "error", "said"),
    [
        ("nothing", "t.jsonl", ConfigError, "is not a folder"),
        (".", "t.txt", ConfigError, r"OUT=.*t.txt: expected the name of a .jsonl file"),
        (".", "t.jsonl", DataError, "has no documents; expected .docx, .pdf, .txt, .md"),
    ],
)
def test_folders_and_names_that_cannot_be_used_are_refused(tmp_path, folder, output, error, said):
    with pytest.raises(error, match=said):
        convert_documents(tmp_path / folder, tmp_path / output)


def test_a_folder_without_any_text_leaves_no_file(tmp_path):
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(DataError, match=r"none of 1 documents could be converted \(a.txt: it has no text"):
        convert_documents(tmp_path, tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


def test_an_existing_file_stays_if_nothing_can_be_converted_or_it_is_not_ours(tmp_path):
    folder, output = tmp_path / "in", tmp_path / "t.jsonl"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    convert_documents(folder, output)
    (folder / "a.txt").write_text(" ")
    with pytest.raises(DataError, match="none of 1 documents"):
        convert_documents(folder, output)
    assert texts(output) == {"a.txt": "text"}
    (folder / "a.txt").write_text("other text")
    convert_documents(folder, output)  # what it has written itself
    assert texts(output) == {"a.txt": "other text"}
    output.write_text('{"question": "mine"}\n')
    with pytest.raises(ConfigError, match="not written by `make dapt-docx`.*FORCE=1"):
        convert_documents(folder, output)
    assert output.read_text() == '{"question": "mine"}\n'
    convert_documents(folder, output, force=True)
    assert texts(output) == {"a.txt": "other text"}
