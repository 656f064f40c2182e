"""pipeline_parallel: several processes have some of the layers each, and hand the hidden states on.

The ranks (*stages*) hold the weights and the KV cache of their layers alone (GPipe, arXiv 1811.06965, without its
micro-batches). The files of the artifact stay those of one process: the pass proves that the graph can be cut into
``size`` stages, and ``optkit serve`` gives each rank its stage when it loads.

Exact: the ops of the graph run on the same numbers as in one process; rotary angles are computed in every stage.

Predicted gain: none in time. Weights and KV of a rank fall to about 1 / size, for a model that one process may not
hold; a table that is token embedding and output head at once stands in the first and in the last stage. The stages
compute one after the other, each with all cores. Price: an exchange of the hidden states at each cut, and one of the
logits: a token of a small model on two cores takes 1.2 times as long in two stages, 1.6 times in three, a prompt 1.1
times. Tensor parallel (``tensor_parallel``) divides the work, too, but needs KV heads that divide.
"""

from __future__ import annotations

from pydantic import Field

from optkit.graph.ir import Graph
from optkit.graph.schema import MAX_RANKS
from optkit.parallel.check import prove
from optkit.parallel.sizes import PIPELINE_PARALLEL, check_alone, check_stages
from optkit.parallel.stages import Stages, stage_graph
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Stage

WHERE = "pipeline_parallel.size"


class PipelineParallelConfig(Config):
    size: int = Field(
        ge=2,
        le=MAX_RANKS,
        description="processes with some of the layers each; at most one for each layer with attention",
    )


class PipelineParallel(Pass):
    name = "pipeline_parallel"
    stage = Stage.COMPILE
    measured = False
    Config = PipelineParallelConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the places to cut.

        Raises:
            UserError: the layers can't be cut into so many stages, or ranks share them already.
        """
        check_alone(graph.annotations, PIPELINE_PARALLEL, WHERE)
        check_stages(graph.meta, self.config.size, WHERE)
        cuts = Stages(graph, self.config.size, WHERE).cuts
        return Plan([Site(", ".join(node.name for node in cut.crossing), ()) for cut in cuts], [])

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        """Prove that the stages compute what ``graph`` does, and note their number.

        Raises:
            UserError: the logits of the stages differ from those of one process.
        """
        stats = prove(graph, self.config.size, WHERE, stage_graph)
        graph.annotations[PIPELINE_PARALLEL] = self.config.size
        return PassResult(len(plan.sites), stats)
