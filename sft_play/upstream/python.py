"""What we take of the private parts of Python's own library."""

from concurrent.futures import ProcessPoolExecutor


def stop_feeding(pool: ProcessPoolExecutor) -> None:
    """Lets a broken pool end, whose thread may be writing to a pipe that no process reads any more.

    Python 3.11.2 waits for that thread without end (issue 94777 of CPython). What makes this unnecessary: a
    later Python, which does the same itself.
    """
    pool._call_queue._reader.close()  # type: ignore[attr-defined]
