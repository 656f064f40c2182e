"""Paged attention on NVIDIA GPUs, for ragged batches of prompts, chunks and single tokens.

Two launches at most. *Tiles* take up to 128 rows, a row being a token and a query head of the group that shares a KV
head, and run on tensor cores. Sequences with one new token, the decodes, get a launch of their own, since their few
rows fill no tile of 128; models without shared heads have a kernel without tensor cores for decodes. Where there are
fewer programs than the GPU runs at once, keys are split among several programs and a third launch merges the partial
results.

Grids depend on shapes alone, and lengths are read on the device: a CUDA graph replays with other lengths, blocks and
slots. The number of splits follows from the widest block table, so a graph should be captured with the longest table
of its replays.

Configurations are picked by hand, for each architecture by the rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.kernel import Kernel
from optkit.kernels.triton import common, sdpa
from optkit.kernels.triton.attention_kernels import attention_heads, attention_tiles, merge_splits
from optkit.kernels.triton.common import Config, next_power_of_2, supports
from optkit.kernels.triton.rope_kv import FLOAT, FORMATS, planes, with_unit_stride, write_kv

# Of ``attention_tiles``, for 16-bit numbers and heads of up to 128, by architecture, whether the pool is quantized, and
# rows: tile (rows, keys), warps, stages. Chosen so that nothing spills (docs/lab-notes.md).
TILES = {
    ("sm_80", False): {
        16: Config((16, 64), 4, 3),
        32: Config((32, 32), 4, 3),
        64: Config((64, 32), 4, 3),
        128: Config((128, 64), 8, 3),
    },
    ("sm_80", True): {
        16: Config((16, 32), 4, 3),
        32: Config((32, 32), 4, 2),
        64: Config((64, 32), 8, 3),
        128: Config((64, 32), 8, 3),
    },
    ("sm_90", False): {
        16: Config((16, 64), 4, 3),
        32: Config((32, 64), 4, 3),
        64: Config((64, 64), 4, 3),
        128: Config((128, 64), 8, 3),
    },
    ("sm_90", True): {
        16: Config((16, 64), 4, 3),
        32: Config((32, 64), 4, 2),
        64: Config((64, 64), 4, 3),
        128: Config((128, 64), 8, 3),
    },
}
HEADS = {"sm_80": Config((32,), 4, 3), "sm_90": Config((32,), 4, 4)}  # of ``attention_heads``
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132}  # where there is no device to ask
WAVES = 2  # programs for each multiprocessor before keys are no longer split
TILES_OF_A_SPLIT = 2  # at least, or merging costs more than it saves
MAX_SPLITS = 64
LOG2_E = 1.4426950408889634


Parts = tuple[Tensor, Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Tensor:
    """See ``reference.attention``."""
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    batch = query_start, seq_lens, block_tables
    operands = sinks, slopes, positions
    return paged_attention(q, k, v, k_cache, v_cache, *batch, *operands, scale, window, softcap, chunk)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Tensor:
    """See ``reference.paged_attention``. q may have any strides; k and v are read for whole prompts (``sdpa``) only."""
    if positions is not None:
        raise ValueError("the kernels for GPUs verify no trees of guesses")
    q = with_unit_stride(q)
    special = softcap or sinks is not None or slopes is not None
    if not special and sdpa.takes(q, k, v, k_cache.dtype, min(window or chunk, chunk or window)):
        return sdpa.dense(q, k, v, scale)
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    tokens, sequences = q.shape[0], seq_lens.shape[0]
    if not tokens or not sequences:
        return out
    call = Call(
        q, k_cache, v_cache, out, query_start, seq_lens, block_tables, sinks, slopes, k.shape[1], scale, window,
        softcap, chunk,
    )  # fmt: skip
    if tokens > sequences:
        call.prompts(skip_single=sequences > 1)
    if tokens == sequences or sequences > 1:
        call.single_tokens()
    return out


@dataclass(frozen=True)
class Call:
    """A call of attention: its tensors, and the parts common to its launches."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    sinks: Tensor | None
    slopes: Tensor | None
    kv_heads: int
    scale: float
    window: int
    softcap: float
    chunk: int

    def prompts(self, skip_single: bool) -> None:
        """Sequences of any number of new tokens; with ``skip_single`` without sequences of one new token."""
        tokens, sequences = self.q.shape[0], self.seq_lens.shape[0]
        # how tokens are shared out is known on the device alone; beside decodes one prompt has nearly all
        config = self.tile_config((tokens - sequences + 1) * self.group)
        blocks = tokens // (config.tile[0] // self.group) + sequences
        splits = 1 if skip_single else self.splits(blocks, config.tile[1])
        self.tiles(config, blocks, splits, tokens, single=False, skip_single=skip_single)

    def single_tokens(self) -> None:
        """Sequences of one new token; all other sequences are passed over."""
        sequences = self.seq_lens.shape[0]
        if self.group > 1:
            config = self.tile_config(self.group)
            splits = self.splits(sequences, config.tile[1])
            self.tiles(config, sequences, splits, sequences, single=True, skip_single=False)
            return
        config = HEADS[self.arch]
        splits = self.splits(sequences, config.tile[0])
        parts = self.parts(sequences, splits)
        attention_heads[(self.kv_heads, sequences, splits)](
            self.q, *self.pools, self.out, *parts, *self.batch, *self.heads, self.exponent, *self.strides,
            SPLITS=splits, TILE=config.tile[0], STAGES=config.stages, **self.constants, num_warps=config.warps,
        )  # fmt: skip
        self.merge(parts, splits, single=True)

    def tiles(
        self, config: Config, blocks: int, splits: int, rows: int, single: bool, skip_single: bool
    ) -> None:
        parts = self.parts(rows, splits)
        attention_tiles[(self.kv_heads, blocks, splits)](
            self.q, *self.pools, self.out, *parts, *self.batch, *self.heads, self.seq_lens.shape[0], self.exponent,
            *self.strides,
            KV_HEADS=self.kv_heads, SINGLE=single, SKIP_SINGLE=skip_single, SPLITS=splits,
            M=config.tile[0], TILE=config.tile[1], PRECISION=self.precision, **self.constants,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        self.merge(parts, splits, single)

    def merge(self, parts: Parts, splits: int, single: bool) -> None:
        if splits > 1:
            grid = (parts[1].shape[0], self.q.shape[1])
            merge_splits[grid](
                *parts, self.out, self.query_start, self.heads[0],
                HEADS=self.q.shape[1], V_DIM=self.out.shape[2], SPLITS=splits, DV=self.constants["DV"],
                SINGLE=single, SINKS=self.sinks is not None, num_warps=4,
            )  # fmt: skip

    def parts(self, rows: int, splits: int) -> Parts:
        """Buffers for splits: sums [rows, H, splits, Dv], weights and tops [rows, H, splits]; empty for one split."""
        heads, dim = self.out.shape[1:]
        shape = (rows if splits > 1 else 0, heads, splits)
        new = partial(torch.empty, dtype=torch.float32, device=self.q.device)
        return new((*shape, dim)), new(shape), new(shape)

    def splits(self, programs: int, tile: int) -> int:
        """Into how many parts the keys are cut for ``programs`` of each KV head: a power of two."""
        longest = self.block_tables.shape[1] * self.k_cache.shape[1]
        for limit in (self.window, self.chunk):
            longest = min(longest, limit + tile) if limit else longest
        wanted = WAVES * multiprocessors(self.q.device) // (programs * self.kv_heads)
        most = min(wanted, longest // (tile * TILES_OF_A_SPLIT), MAX_SPLITS)
        return 1 << (max(1, most).bit_length() - 1)

    def tile_config(self, rows: int) -> Config:
        """The largest tile for ``rows`` in a sequence that is full while every multiprocessor has a tile."""
        size = min(max(16, next_power_of_2(max(rows, self.group))), 128)
        programs = self.seq_lens.shape[0] * self.kv_heads
        if size == 128 and -(-rows // 128) * programs < multiprocessors(self.q.device):
            size = 64
        size = max(size, next_power_of_2(self.group))
        wide = max(self.constants["D"], self.constants["DV"]) > 128
        if size <= 128 and not wide and self.q.dtype is not torch.float32:
            return TILES[self.arch, bool(self.constants["FORMAT"])][size]
        rows = max(32, next_power_of_2(self.group))
        return Config((rows, 16), 8, 2) if self.q.dtype is torch.float32 else Config((rows, 32), 4, 2)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def arch(self) -> str:
        return common.architecture(self.q.device)

    @property
    def precision(self) -> str:
        return "ieee" if self.q.dtype is torch.float32 else "tf32"  # which 16-bit numbers don't use

    @cached_property
    def pools(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (k, k_scales), (v, v_scales) = planes(self.k_cache), planes(self.v_cache)
        return k, v, k_scales, v_scales

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query_start, self.seq_lens, self.block_tables

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        """Sinks and slopes; any tensor in the place of none, which no kernel reads."""
        return tuple(self.seq_lens if x is None else x for x in (self.sinks, self.slopes))  # type: ignore[return-value]

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.q.stride(0), self.q.stride(1), self.block_tables.stride(0)

    @property
    def exponent(self) -> float:
        """The factor from scores to exponents of 2; with a soft-cap, which is applied first, the factor of the scores
        alone.
        """
        return self.scale if self.softcap else self.scale * LOG2_E

    @cached_property
    def constants(self) -> dict[str, Any]:
        dim, v_dim = self.q.shape[2], self.out.shape[2]
        k, v, k_scales, v_scales = self.pools
        return {
            "HEADS": self.q.shape[1],
            "DIM": dim,
            "V_DIM": v_dim,
            "D": max(16, next_power_of_2(dim)),
            "DV": max(16, next_power_of_2(v_dim)),
            "BLOCK_SIZE": self.k_cache.shape[1],
            "K_BLOCK": k.stride(0),
            "V_BLOCK": v.stride(0),
            "K_SCALES": k_scales.stride(0),
            "V_SCALES": v_scales.stride(0),
            "FORMAT": FORMATS.get(self.k_cache.dtype, FLOAT),
            "NATIVE": self.arch == "sm_90" and self.q.device.type != "cpu",
            "WINDOW": self.window,
            "CHUNK": self.chunk,
            "SOFTCAP": self.softcap,
            "SINKS": self.sinks is not None,
            "SLOPES": self.slopes is not None,
        }


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS[common.architecture(device)]
    return torch.cuda.get_device_properties(device).multi_processor_count


def with_values(options: Mapping[str, Any]) -> bool:
    """True for a site with a pool of V and dense prefill."""
    return not options.get("latent") and not options.get("sparse_cover")


KERNELS = tuple(
    Kernel(
        name,
        "triton",
        function,
        supports,
        handles=with_values,
        needs="a pool of V, so no latent KV; dense prefill",
    )
    for name, function in (("attention", attention), ("paged_attention", paged_attention))
)
