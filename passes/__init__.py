"""The pass table: a file for each pass, and a row here, ``name: "module:Class"``, imported on use.

Passes from other packages come through the entry-point group ``optkit.passes`` (``optkit.plugins``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from optkit import plugins
from optkit.errors import UserError, nearest
from optkit.plugins import PlugIn, PlugInError

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
    "drop_layers": "optkit.passes.drop_layers:DropLayers",
    "prune_2_4": "optkit.passes.prune_2_4:Prune24",
    "distill": "optkit.passes.distill:Distill",
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
    "sparse_prefill": "optkit.passes.sparse_prefill:SparsePrefill",
    "compile": "optkit.passes.compile:Compile",
    "tensor_parallel": "optkit.passes.tensor_parallel:TensorParallel",
    "pipeline_parallel": "optkit.passes.pipeline_parallel:PipelineParallel",
    "bake_prefix": "optkit.passes.bake_prefix:BakePrefix",
}


def names() -> list[str]:
    """Every known pass, built in and of plug-ins."""
    return list(dict.fromkeys([*PASSES, *(plugin.name for plugin in plugins.installed(plugins.PASSES))]))


def is_known(name: str) -> bool:
    """True for the name of a pass, built in or of a plug-in."""
    return name in PASSES or any(plugin.name == name for plugin in plugins.installed(plugins.PASSES))


def plug_in(name: str) -> PlugIn | None:
    """The plug-in with pass ``name``; None for a built-in or unknown pass."""
    return None if name in PASSES else plugins.find(plugins.PASSES, name)


def load(name: str) -> type[Pass]:
    """The class of pass ``name``; with a pass of a plug-in, the ops of plug-ins are registered.

    Raises:
        UserError: an unknown pass; the message has the nearest name. A plug-in that can't be used.
    """
    if name in PASSES:
        module, _, attribute = PASSES[name].partition(":")
        return getattr(import_module(module), attribute)
    plugin = plug_in(name)
    if plugin is None:
        raise UserError(f"there is no pass '{name}'", fix=nearest(name, names()))
    return load_plug_in(plugin)


def load_plug_in(plugin: PlugIn) -> type[Pass]:
    """The class of a plug-in's pass.

    Raises:
        PlugInError: the import failed, or the class breaks the contract.
    """
    from pydantic import BaseModel

    from optkit.graph.ops.plugins import register_all
    from optkit.passes.base import Pass, Stage

    found = plugins.load(plugin)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise PlugInError(plugin, "it is no subclass of optkit.passes.base.Pass")
    if getattr(found, "name", None) != plugin.name:
        raise PlugInError(plugin, f"the class has the name {getattr(found, 'name', None)!r}")
    if not isinstance(getattr(found, "stage", None), Stage) or not issubclass(found.Config, BaseModel):
        raise PlugInError(
            plugin, "the class needs a stage of optkit.passes.base.Stage, and a pydantic Config"
        )
    register_all()
    return found
