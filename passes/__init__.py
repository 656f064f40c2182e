"""The pass table: a file for each pass, and a row here, ``name: "module:Class"``, imported on use.

Passes from other packages come through the entry-point group ``optkit.passes``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from optkit.errors import UserError, nearest

if TYPE_CHECKING:
    from optkit.passes.base import Pass

PASSES: dict[str, str] = {
    "latent_kv": "optkit.passes.latent_kv:LatentKV",
    "fuse_qkv": "optkit.passes.fuse_qkv:FuseQKV",
    "fuse_gate_up": "optkit.passes.fuse_gate_up:FuseGateUp",
    "fuse_add_rms_norm": "optkit.passes.fuse_add_rms_norm:FuseAddRMSNorm",
    "select_logits_rows": "optkit.passes.select_logits_rows:SelectLogitsRows",
    "prune_ffn": "optkit.passes.prune_ffn:PruneFFN",
    "prune_heads": "optkit.passes.prune_heads:PruneHeads",
    "rotate": "optkit.passes.rotate:Rotate",
    "smoothquant": "optkit.passes.smoothquant:SmoothQuant",
    "int8": "optkit.passes.int8:Int8",
    "rtn": "optkit.passes.rtn:RTN",
    "gptq": "optkit.passes.gptq:GPTQ",
    "awq": "optkit.passes.awq:AWQ",
    "mixed_precision": "optkit.passes.mixed_precision:MixedPrecision",
    "w4a8": "optkit.passes.w4a8:W4A8",
    "fp8": "optkit.passes.fp8:FP8",
    "flash_attention": "optkit.passes.flash_attention:FlashAttention",
    "kv_int8": "optkit.passes.kv_int8:KVInt8",
    "kv_fp8": "optkit.passes.kv_fp8:KVFP8",
    "compile": "optkit.passes.compile:Compile",
}


def names() -> list[str]:
    """Every known pass, built in and installed."""
    return [*PASSES, *(e.name for e in entry_points(group="optkit.passes") if e.name not in PASSES)]


def entry_point(name: str) -> EntryPoint | None:
    """The entry point of pass ``name`` in an installed package; None for a built-in or unknown pass."""
    if name in PASSES:
        return None
    return next((entry for entry in entry_points(group="optkit.passes") if entry.name == name), None)


def load(name: str) -> type[Pass]:
    """The class of pass ``name``.

    Raises:
        UserError: an unknown pass; the message has the nearest name.
    """
    if name in PASSES:
        module, _, attribute = PASSES[name].partition(":")
        return getattr(import_module(module), attribute)
    entry = entry_point(name)
    if entry is not None:
        return entry.load()
    raise UserError(f"there is no pass '{name}'", fix=nearest(name, names()))
