"""bake_prefix: the KV of known prompts becomes a part of the artifact, so that the first request need not compute it.

The first token of a request with a long system prompt waits for the prefill of the prompt, after every start of the
server anew. A prompt known to ``optkit optimize`` is computed there: after the artifact is written, by the artifact's
own runtime in a new process, twice in unlike steps; both must agree bit for bit (``optkit.pipeline.bake``). The blocks
are stored in ``optkit/prefix.safetensors``, and ``optkit serve`` copies them into its prefix cache and pins them.
Exact: the KV is the KV that the server would compute. The graph stays as it is, so nothing is measured.

Predicted gain: the time to first token falls by the share of the baked tokens in the prompt. Price: the bytes of the
KV on disk, in memory, and in the hashes that a start checks.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from optkit.graph.ir import Graph
from optkit.graph.states import recurrent_of
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage

TEMPLATE = "chat template"
PromptFile = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]


class BakePrefixConfig(Config):
    prompts: tuple[PromptFile, ...] = Field(
        (),
        max_length=32,
        strict=False,
        description="files: .json has the messages that begin conversations, any other the text of a system prompt "
        "(without a chat template: the beginning of the prompt)",
    )
    template: bool = Field(
        True, description="also the beginning that the chat template gives every conversation"
    )


class BakePrefix(Pass):
    name = "bake_prefix"
    stage = Stage.COMPILE
    measured = False
    Config = BakePrefixConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        names = [*self.config.prompts, *[TEMPLATE] * self.config.template]
        reason = why_not(graph, ctx)
        if reason:
            return Plan(skips=[Skip(name, reason) for name in names])
        return Plan([Site(name, ()) for name in names])

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        return PassResult(len(plan.sites))


def why_not(graph: Graph, ctx: PassContext) -> str | None:
    """The reason against storing KV of ``graph``, or None."""
    if recurrent_of(graph.meta.states):
        return "a recurrent state would have to be stored with the KV, and is not"
    if not graph.meta.kv_specs:
        return "no layer keeps KV"
    if ctx.target.kind != "cpu":
        return "KV is stored for CPUs alone: a GPU computes a prompt faster than it is read from a disk"
    return None
