"""What we take of the private parts of Python's own library."""

import sys
from concurrent.futures import ProcessPoolExecutor


def stop_feeding(pool: ProcessPoolExecutor) -> None:
    """Lets a broken pool end, whose thread may be writing to a pipe that no process reads any more.

    Before 3.11.5 Python waits for that thread without end (issue 94777 of CPython). It is unnecessary since,
    and wrong: Python closes the pipe itself, in a thread, and the second to close it finds a bad file
    descriptor.
    """
    if sys.version_info < (3, 11, 5):
        pool._call_queue._reader.close()  # type: ignore[attr-defined]
