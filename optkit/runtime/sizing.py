"""The sizes of an engine: blocks of the KV cache, states, and the scheduler's limits, from a model and the options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from optkit.errors import UserError
from optkit.graph.kv_layout import KVLayout, kv_layout
from optkit.graph.states import KVSpec, StateSpec, recurrent_of, sequence_bytes
from optkit.recipe.engine_options import MAX_REQUESTS, EngineOptions
from optkit.runtime.kv.offload import HostBlockStore, open_store
from optkit.runtime.kv.windows import most_tokens
from optkit.runtime.scheduling.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from optkit.runtime.cuda.device import Device
    from optkit.runtime.loaded import Model
    from optkit.runtime.speculation import Guesser

logger = logging.getLogger(__name__)

SLOT_SHARE, CHECKPOINT_SHARE = 2, 4  # of a model with KV: half of kv_cache_bytes, and a quarter
LEAST_CHECKPOINTS = 4  # states kept by default
MOST_FREE_BLOCKS = 1 << 20  # of a model without KV
PREFILL_TARGET_TOKENS = 256  # on a CPU, where matrix products reach full speed at 128 to 256 rows


class HasStates(Protocol):
    """The facts that decide on the memory of a model's states: of a lowered model, or of graph.json."""

    @property
    def states(self) -> Sequence[StateSpec]: ...

    @property
    def kv_specs(self) -> Sequence[KVSpec]: ...

    @property
    def max_model_len(self) -> int: ...


def with_kv_bytes(
    model: Model, options: EngineOptions, gpu: Device, guesses: Guesser | None = None
) -> EngineOptions:
    """``options`` with the bytes of the KV cache: on a GPU the memory left by weights and the largest step.

    ``guesses``: the source of proposals, with weights and KV pool on the GPU already.
    """
    from optkit.runtime.cuda.start import kv_cache_bytes

    if options.kv_cache_bytes is not None:
        return options
    layout, state = kv_layout(model.states), sequence_bytes(model.states)
    blocks = (model.max_model_len // options.block_size + 2) * len(layout.groups)
    enough = layout.num_bytes(blocks, options.block_size)
    if state:  # enough for every share
        states = options.max_num_seqs + (options.state_checkpoints or LEAST_CHECKPOINTS)
        enough = CHECKPOINT_SHARE * (enough + states * state)
    limits = scheduler_config(model, msgspec.structs.replace(options, kv_cache_bytes=enough))
    draft_step = gpu.peak_bytes(lambda: guesses.run_largest(limits.max_num_seqs)) if guesses else 0
    left = kv_cache_bytes(model, limits, gpu, options.gpu_memory_utilization, draft_step)
    asked = limits.num_checkpoints if limits.num_state_slots else options.state_checkpoints
    kept = (limits.num_state_slots + limits.num_checkpoints) * state
    return msgspec.structs.replace(options, kv_cache_bytes=left + kept, state_checkpoints=asked)


def scheduler_config(
    model: Model, options: EngineOptions, target: str = "", layout: KVLayout | None = None
) -> SchedulerConfig:
    """The scheduler's limits: from the model and from ``options``.

    Args:
        target: of the recipe; on "cpu" a step takes no further prompt once matrix products run at full speed.
        layout: the groups of layers with block tables of their own, by default those of ``kv_layout``.

    Raises:
        UserError: the KV cache holds too little, or ``options`` ask for more than the model has.
    """
    if not model.states:
        raise UserError(
            "no layer keeps a state between tokens, so there is nothing to serve", where="graph.json"
        )
    layout = layout or kv_layout(model.states)
    slots, checkpoints = num_states(model, options)
    if slots < options.max_num_seqs:
        logger.warning(
            "%d of %d requests (max_num_seqs) run at once: %d recurrent states of %d bytes fit their share of "
            "kv_cache_bytes",
            *(slots, options.max_num_seqs, slots, sequence_bytes(model.states)),
        )
    blocks = num_blocks(model, options, slots, checkpoints, layout)
    room = most_tokens(layout.windows, blocks, options.max_num_batched_tokens, options.block_size)
    asked = options.max_model_len or model.max_model_len
    if asked > model.max_model_len:
        raise UserError(
            f"the model's context is {model.max_model_len} tokens, {asked} were asked for",
            where="max_model_len",
        )
    try:
        return SchedulerConfig(
            **options.scheduling() | {"max_num_seqs": slots},
            max_model_len=min(asked, room),
            num_blocks=blocks,
            prefill_target_tokens=PREFILL_TARGET_TOKENS if target == "cpu" else 0,
            num_state_slots=slots if recurrent_of(model.states) else 0,
            num_checkpoints=checkpoints,
            variant_limits=model.variant_limits,
            kv_windows=layout.windows,
            keeps_all=getattr(model, "keeps_all", ""),
        )
    except ValueError as error:
        raise UserError(str(error), where="options of the runtime", fix="optkit serve --help") from error


def num_states(model: HasStates, options: EngineOptions) -> tuple[int, int]:
    """Requests that run at once, and checkpoints for the prefix cache, with room in ``kv_cache_bytes`` for the states.

    Of a model with KV the requests get half of the bytes, and the checkpoints what was asked for or a quarter. Without
    KV the requests come first, and the checkpoints get the rest. A model without recurrent states runs all requests.
    """
    size, total = sequence_bytes(model.states), options.kv_cache_bytes or 0
    if not size:
        return options.max_num_seqs, 0
    asked = options.state_checkpoints if options.enable_prefix_caching else 0
    least = LEAST_CHECKPOINTS if asked is None else asked
    share = total // SLOT_SHARE if model.kv_specs else total - least * size
    slots = min(options.max_num_seqs, max(1, share // size))
    rest = total // CHECKPOINT_SHARE if model.kv_specs else total - slots * size
    return slots, min(MAX_REQUESTS, max(least, rest // size)) if asked is None else asked


def num_blocks(
    model: HasStates, options: EngineOptions, slots: int, checkpoints: int, layout: KVLayout
) -> int:
    """Blocks of the KV pool. Without KV blocks cost nothing; there are enough for all requests and checkpoints.

    Raises:
        UserError: the recurrent states leave room for fewer than two for each group.
    """
    size, states = options.kv_cache_bytes or 0, (slots + checkpoints) * sequence_bytes(model.states)
    least = 2 * len(layout.groups) if model.kv_specs else 0
    need = states + layout.num_bytes(least, options.block_size)
    if size < need:
        held = [f"{slots} recurrent states", f"{checkpoints} checkpoints"] if states else []
        held += [f"{'two' if least == 2 else least} blocks"] if model.kv_specs else []
        raise UserError(
            f"{size:,} bytes of KV cache do not hold {' and '.join(held)} ({need:,} bytes)",
            where="kv_cache_bytes",
            fix=f"raise --kv-cache-bytes{' or lower --state-checkpoints' * bool(states)}",
        )
    if model.kv_specs:
        return layout.blocks_in(size - states, options.block_size)
    longest = -(-model.max_model_len // options.block_size)
    return max(longest + 1, min((slots + checkpoints) * longest, MOST_FREE_BLOCKS))


def offloading(
    config: SchedulerConfig, model: Model, num_bytes: int, directory: str | None
) -> tuple[SchedulerConfig, HostBlockStore]:
    """``config`` with host blocks for evicted KV, and the store."""
    if not config.enable_prefix_caching:
        raise UserError(
            "offloading needs the prefix cache, which is off",
            where="kv_offload_bytes",
            fix="leave out --kv-offload-bytes, or --no-enable-prefix-caching",
        )
    if config.num_state_slots:
        raise UserError(
            "the store keeps KV alone, and KV without the recurrent state of the model can't be used",
            where="kv_offload_bytes",
            fix="leave out --kv-offload-bytes; --state-checkpoints keeps more states in memory",
        )
    size = kv_layout(model.states).block_bytes(config.block_size)
    num_host_blocks, store = open_store(num_bytes, size, Path(directory) if directory else None)
    return msgspec.structs.replace(config, num_host_blocks=num_host_blocks), store
