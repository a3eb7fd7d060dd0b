"""Streams that can always be written to."""

import os
import subprocess
import sys
import threading

import pytest

from sft_play.errors import StorageError
from sft_play.ui.streams import open_output

TEXT = "a line of text \u2192\n" * 20_000


def test_a_pipe_that_does_not_block_gets_everything():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    got = []
    reader = threading.Thread(target=lambda: got.append(os.fdopen(reading, "rb").read()))
    with open_output(writing) as stream:
        stream.write(TEXT[:100])
        reader.start()
        stream.write(TEXT[100:])
    reader.join()
    assert got[0].decode(stream.encoding) == TEXT


def test_bytes_that_are_not_utf_8_can_be_read_and_closed_streams_are_nothing():
    code = "from sft_play.ui.streams import secure_streams; secure_streams(); print(ascii(input()))"
    command = [sys.executable, "-X", "utf8", "-c", code]
    assert subprocess.check_output(command, input=b"a\xff\n") == b"'a\\udcff'\n"
    ended = subprocess.run(["bash", "-c", '"$@" <&- >&-', "-", *command], stderr=subprocess.PIPE, text=True)
    assert ended.stderr.endswith("EOFError: EOF when reading a line\n")


def test_what_cannot_be_written_is_dropped_or_is_an_error_where_it_is_all_there_is():
    with open_output(os.open("/dev/full", os.O_WRONLY)) as stream:
        print(TEXT, file=stream)
    with open_output(os.open("/dev/full", os.O_WRONLY)) as stream:
        stream.buffer.raw.needed = True
        with pytest.raises(StorageError, match="No space left on device"):
            print(TEXT, file=stream, flush=True)
