"""Starting the ranks of an engine: processes, the model of rank 0, and the engine around it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from optkit.artifact.open import Artifact
from optkit.graph.kv_layout import KVLayout, kv_layout, one_group
from optkit.kernels.cpu import native
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.embedding import Embedder
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import HostBlockStore
from optkit.runtime.ranks.leader import RankedRunner, Ranks
from optkit.runtime.ranks.model import RankModel, communicator, load_rank
from optkit.runtime.ranks.size import Sharing
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.drafts import Proposer
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import EngineRefusal

STAGES_REASON = "the stages of pipeline parallel have a common block table"


@dataclass(frozen=True)
class RankZero:
    """The model of rank 0, and the processes of the other ranks.

    ``whole``: the KV of all layers, where each rank has some of the layers; else None.
    """

    model: RankModel
    ranks: Ranks
    whole: KVLayout | None = None


def start(artifact: Artifact, options: EngineOptions, shared: Sharing) -> RankZero:
    """Start the other ranks, and load the share of rank 0 meanwhile. ``options`` are for a single rank.

    Raises:
        UserError: a rank could not load its share.
    """
    torch.set_num_threads(options.threads)
    size, file = shared.size, region_file(shared.size)
    ranks = Ranks.start(
        str(artifact.directory), shared, options.threads, file, trust_code=options.trust_artifact_code
    )
    try:
        own = communicator(0, size, options.threads, file, ranks.meeting)
        ranks.communicator = own
        model = load_rank(artifact, own, shared.kind, trust_code=options.trust_artifact_code)
        ranks.weight_bytes = model.weight_bytes + ranks.wait_loaded()
    except BaseException:
        ranks.close(at_once=True)
        raise
    return RankZero(model, ranks, layout_of_stages(artifact) if shared.by_layers else None)


def layout_of_stages(artifact: Artifact) -> KVLayout:
    """The KV of all layers in one group, since the stages have a common block table."""
    states = artifact.meta().states
    return one_group(states, reason=STAGES_REASON if any(kv_layout(states).windows) else "")


def region_file(size: int) -> int:
    """The descriptor of the memory in which ranks exchange tensors."""
    from optkit.kernels.cpu import shared_memory

    num_bytes = int(native.library().optkit_region_bytes(size)) if native.available() else 0
    fd = shared_memory.new_file(num_bytes)
    os.set_inheritable(fd, True)
    return fd


def ranked_engine(
    zero: RankZero,
    config: SchedulerConfig,
    layout: KVLayout,
    store: HostBlockStore | None,
    guesses: Proposer | None,
    cost: CostModel,
) -> Engine:
    """The engine of rank 0, which sends each step to the other ranks."""
    total = None if zero.whole is None else zero.whole.num_bytes(config.num_blocks, config.block_size)
    runner = RankedRunner(zero.model, config.num_blocks, config.block_size, zero.ranks, layout, total)
    engine = Engine(runner, config, store, guesses, cost=cost)
    engine.alive, engine.make_embedder = zero.ranks.check, no_embedder
    return engine


def no_embedder() -> Embedder:
    """Refuse embeddings, which need the graph of a single process."""
    raise EngineRefusal("embeddings are computed by engines of one rank")
