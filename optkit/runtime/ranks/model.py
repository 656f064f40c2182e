"""The model of a rank: the rank's share of an artifact, lowered and called under the rank's communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from optkit.artifact.open import Artifact
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.kernels.collectives import Communicator, using
from optkit.lowering.lower import Executable
from optkit.parallel.rank_graph import rank_graph
from optkit.parallel.sizes import PIPELINE_PARALLEL, TENSOR_PARALLEL
from optkit.parallel.stages import stage_graph
from optkit.recipe.engine_options import flag
from optkit.runtime.ranks.size import option

SEVERAL_RANKS = "several ranks share its layers (--tensor-parallel-size, --pipeline-parallel-size)"
PARTS = {TENSOR_PARALLEL: rank_graph, PIPELINE_PARALLEL: stage_graph}


class RankModel(Executable):
    """An executable whose calls exchange tensors with the other ranks. All ranks make the same calls.

    Args:
        limits: ``variant_limits`` of the whole model; a stage may have none of the layers with variants.
    """

    def __init__(self, executable: Executable, communicator: Communicator, limits: Sequence[int]) -> None:
        super().__init__(executable.variants, SEVERAL_RANKS)
        self.communicator, self.limits = communicator, tuple(limits)

    @property
    def variant_limits(self) -> tuple[int, ...]:
        """See ``ByTokens``; of all ranks."""
        return self.limits

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits [L, V], in every rank."""
        with using(self.communicator):
            return super().__call__(inputs)


def load_rank(
    artifact: Artifact, communicator: Communicator, kind: str = TENSOR_PARALLEL, *, trust_code: bool = False
) -> RankModel:
    """The share of ``artifact`` of a communicator's rank. Other ranks' rows, columns and layers are not read.

    Raises:
        UserError: the model can't be shared by so many ranks.
    """
    limits, where = list[int](), flag(option(kind))

    def share(graph: Graph) -> Graph:
        limits.extend(variants.limits(graph))
        return PARTS[kind](graph, communicator.rank, communicator.size, where)

    with using(communicator):
        executable = artifact.executable(trust_code=trust_code, change=share)
        return RankModel(executable, communicator, limits)


def communicator(rank: int, size: int, threads: int, region_fd: int, meeting: str) -> Communicator:
    """The communicator of ``rank``: shared memory, or gloo where the native kernels are missing.

    Args:
        threads: compute threads of a rank.
        region_fd: an inherited file of ``SharedRegion``.
        meeting: the file in which the ranks meet for gloo.
    """
    import torch

    from optkit.kernels.cpu import native

    torch.set_num_threads(threads)
    if native.available():
        from optkit.kernels.cpu.shared_memory import SharedRank, SharedRegion

        return SharedRank(SharedRegion(size, region_fd), rank)
    from optkit.kernels.distributed import join

    return join("gloo", meeting, rank, size)
