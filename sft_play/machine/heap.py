"""Settings of the C library's heap for training on a CPU."""

import ctypes

# parameters of mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_KEPT = 2**31 - 1  # bytes of free memory at the top of the heap; an int is all that mallopt takes
LARGEST_ON_HEAP = 32 << 20  # glibc's own maximum


def keep_freed_memory() -> None:
    """Keeps memory that a micro-batch frees for the next one.

    glibc returns what exceeds 64 MiB to the operating system, which clears each page when it is used again:
    as often as there are micro-batches, and the more, the larger they are. Other C libraries are left alone.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)
