"""Starting a GPU engine: memory for KV, graphs to capture, warm-up.

The order matters. The weights are on the GPU, and so are the weights and the KV pool of a draft model. A *profile
run* of the largest step measures the rest of the runtime's memory; the KV pool gets the remainder of
``gpu_memory_utilization``. Then decode graphs of a few sizes are timed, bucket sizes are chosen by the times, and all
graphs are captured, largest first. After the start nothing is compiled or captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from optkit.errors import UserError
from optkit.graph.kv_layout import layout_of
from optkit.graph.states import sequence_bytes
from optkit.kernels import reference
from optkit.runtime.cuda.buckets import Buckets, chunk_sizes, decode_sizes, likely_batches, most_graphs
from optkit.runtime.cuda.device import Device
from optkit.runtime.cuda.layout import StepShape
from optkit.runtime.cuda.runner import GraphRunner
from optkit.runtime.cuda.sampling import Sampler
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import HostBlockStore
from optkit.runtime.kv.windows import most_tokens
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.runner import ServableModel
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import Proposer, SchedulerConfig

GRAPH_BYTES = 8 << 20  # memory of a captured graph besides its tensors, and fragmentation
Progress = Callable[[str], None]


def quiet(text: str) -> None:
    """A ``Progress`` without output."""


def kv_cache_bytes(
    model: ServableModel,
    limits: SchedulerConfig,
    device: Device,
    gpu_memory_utilization: float,
    draft_step: int = 0,
) -> int:
    """Bytes for the KV pool: the given share of the device's memory, less weights, the largest step and graphs.

    Args:
        draft_step: bytes allocated by the largest step of a draft model, whose weights and pool are allocated
            already.

    Raises:
        UserError: not even two blocks are left.
    """
    free, total = device.free_memory()
    layout = layout_of(model.states, limits.kv_windows)
    trial = GraphRunner(model, 1, limits.block_size, device, largest_step(limits), num_slots=1, layout=layout)
    states = (limits.num_state_slots + limits.num_checkpoints) * sequence_bytes(model.states)
    step = device.peak_bytes(trial.run_largest)
    graphs = GRAPH_BYTES * most_graphs(limits.max_num_batched_tokens)
    left = int(total * gpu_memory_utilization) - (total - free) - 2 * step - graphs - draft_step - states
    need = layout.num_bytes(2 * len(layout.groups), limits.block_size)
    if left < need:
        raise UserError(
            f"{max(left, 0):,} bytes of {total:,} are left for the KV cache, the fewest blocks need {need:,}",
            where=str(device.torch_device),
            fix="lower max_num_batched_tokens, raise gpu_memory_utilization, or quantize the model",
        )
    return left


def sized(model: ServableModel, limits: SchedulerConfig, num_bytes: int) -> SchedulerConfig:
    """``limits`` with as many blocks as fit ``num_bytes``."""
    blocks = layout_of(model.states, limits.kv_windows).blocks_in(num_bytes, limits.block_size)
    step = limits.max_num_batched_tokens
    room = most_tokens(limits.kv_windows, blocks, step, limits.block_size)
    return msgspec.structs.replace(limits, num_blocks=blocks, max_model_len=min(limits.max_model_len, room))


def largest_step(limits: SchedulerConfig) -> StepShape:
    return StepShape(
        limits.max_num_batched_tokens, limits.max_num_seqs, -(-limits.max_model_len // limits.block_size)
    )


def gpu_engine(
    model: ServableModel,
    config: SchedulerConfig,
    device: Device,
    *,
    store: HostBlockStore | None = None,
    proposer: Proposer | None = None,
    cost: CostModel | None = None,
    histogram: Mapping[int, float] | None = None,
    sample: Sampler = reference.sample,
    progress: Progress = quiet,
) -> Engine:
    """A warm engine with all graphs captured.

    With a proposer, or with recurrent states, whose checkpoints are copied between two steps, the engine samples on the
    host, a step at a time.
    """
    largest = largest_step(config)
    slots = config.num_state_slots + config.num_checkpoints
    layout = layout_of(model.states, config.kv_windows)
    runner = GraphRunner(model, config.num_blocks, config.block_size, device, largest, sample, slots, layout)
    progress("measuring decode steps")
    weights = histogram or likely_batches(config.max_num_seqs)
    sizes = decode_sizes(weights, lambda batch: runner.measure(StepShape(batch, batch, largest.blocks)))
    buckets = Buckets(sizes, chunk_sizes(config.max_num_batched_tokens), config.max_num_seqs, largest.blocks)
    progress(f"capturing {len(buckets.shapes())} graphs")
    runner.capture(buckets)
    runner.run_largest()  # compiles the kernels of eager steps
    made = Engine if proposer is not None or config.num_state_slots else OverlapEngine
    return made(runner, config, store, proposer, cost=cost)
