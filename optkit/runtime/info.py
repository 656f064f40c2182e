"""The facts about a loaded engine for the API process, as messages between the processes."""

from __future__ import annotations

import msgspec

from optkit.runtime.scheduling.config import SchedulerConfig


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a runtime. ``num_sequences`` requests of ``sequence_length`` tokens fit the KV pool at once.

    Attributes:
        dtype: element type of the pool, in words (``optkit.runtime.kv.pools.dtype_label``).
        weight_bytes, workspace_bytes: of the weights and of the largest step; 0 if unknown.
        state_bytes: of the recurrent states of ``num_state_slots`` requests and ``num_checkpoints`` checkpoints.
    """

    num_blocks: int
    num_tokens: int
    num_bytes: int
    sequence_length: int
    num_sequences: int
    dtype: str
    weight_bytes: int = 0
    workspace_bytes: int = 0
    state_bytes: int = 0
    num_state_slots: int = 0
    num_checkpoints: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine: limits, memory, process.

    Attributes:
        vocab_size: token ids of the model are in [0, vocab_size).
        kv_layout: digest of the meaning of the bytes of a KV block; empty: the engine exchanges no blocks.
        peer_address: host and port at which other engines fetch blocks; empty: none are given.
        num_ranks: processes that share the model, by layers or within them.
        gpu_memory_utilization: the share of a GPU's memory, when the KV cache got the rest of the share.
        from_saved_weights: started from a file of the private cache, without torch.
        load_seconds: time of loading; set by the process, like ``pid``.
    """

    config: SchedulerConfig
    memory_plan: MemoryPlan
    vocab_size: int
    num_ranks: int = 1
    gpu_memory_utilization: float | None = None
    kv_layout: str = ""
    peer_address: str = ""
    from_saved_weights: bool = False
    load_seconds: float = 0.0
    pid: int = 0
