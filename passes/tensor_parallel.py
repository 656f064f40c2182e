"""tensor_parallel: several processes share every layer; each has a part of the weights and of the KV cache.

A rank computes some columns of the first linear layers of a block (q, k, v; gate, up) and multiplies the same input
channels of the last (o; down), whose results are added over the ranks (Megatron-LM, arXiv 1909.08053). The ranks also
share the token embedding and the output head by the vocabulary. The files of the artifact stay those of one process:
the pass proves that ``size`` ranks can share the graph, and ``optkit serve`` gives each rank its part when it loads.

Exact. Of int8 layers the ranks give the bits of one process: a token's scale is that of the whole row, and int32 sums
are added before the conversion to floats; layers with scales of groups gather the int8 inputs instead. Float results
of the ranks are added in float32, in the order of the ranks, so the last bits differ from those of one process.

Predicted gain: weights and KV of a rank fall to 1 / size, and so does the time that a decode step reads weights, if
every rank has memory bandwidth of its own (another socket, another GPU). Price: two to four exchanges a layer. On the
cores of one socket a process with as many threads is faster.
"""

from __future__ import annotations

from pydantic import Field

from optkit.graph.ir import Graph
from optkit.graph.schema import MAX_RANKS
from optkit.parallel.check import prove
from optkit.parallel.rank_graph import describe, rank_graph
from optkit.parallel.sizes import TENSOR_PARALLEL, check_alone, check_size
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage

WHERE = "tensor_parallel.size"


class TensorParallelConfig(Config):
    size: int = Field(
        ge=2,
        le=MAX_RANKS,
        description="processes that share every layer; it must divide the number of KV heads",
    )


class TensorParallel(Pass):
    name = "tensor_parallel"
    stage = Stage.COMPILE
    measured = False
    Config = TensorParallelConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the layers that ranks share.

        Raises:
            UserError: heads can't be shared out evenly (the message has the sizes that work), or the graph has stages.
        """
        check_alone(graph.annotations, TENSOR_PARALLEL, WHERE)
        check_size(graph.meta, self.config.size, WHERE)
        shared, whole = describe(graph, self.config.size)
        return Plan(
            [Site(name, ()) for name in shared], [Skip(name, reason) for name, reason in whole.items()]
        )

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        """Prove that the ranks' graphs compute what ``graph`` does, and note the size.

        Raises:
            UserError: the ranks' logits differ from those of one process.
        """
        stats = prove(graph, self.config.size, WHERE, rank_graph)
        graph.annotations[TENSOR_PARALLEL] = self.config.size
        return PassResult(len(plan.sites), stats)
