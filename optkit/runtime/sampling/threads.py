"""Threads of torch's operators on rows of logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's operators on the calling thread.

    A row of logits is too short to gain by a second thread. Beside busy processes a second thread may have to wait for
    a processor, and the calling thread waits at the end of every operator: 10 ms a token instead of 0.5.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
