"""All ranks of a model as threads of a single process, for checks."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optkit.errors import CollectiveFailed
from optkit.kernels.collectives import Communicator, Threads, using


def in_threads(
    work: Callable[[int], Any], size: int, ranks: Sequence[Communicator] | None = None
) -> list[Any]:
    """The results of ``work(rank)``, each in a separate thread with the rank's communicator.

    Args:
        ranks: the communicators; by default of threads.

    Raises:
        Exception: the first exception of a rank.
    """
    group = Threads(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with using((ranks or group.ranks)[rank]):
                results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)
            group.abort()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, CollectiveFailed)), errors[0])
    return results


def logits_of_ranks(
    models: Sequence[Callable[[Mapping[str, Tensor]], Tensor]], inputs: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """The logits of each rank for its ``inputs``, with the pools of the rank."""
    with torch.inference_mode():
        return in_threads(lambda rank: models[rank](inputs[rank]), len(models))
