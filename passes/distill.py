"""distill: trains a changed model, for a number of minutes, to give the distributions of the source model again.

Low-rank adapters on the float linear layers are trained by the source model's distributions over calibration text
(knowledge distillation, arXiv 1503.02531; pruned models as in arXiv 2407.14679) and merged into the weights: nothing
is left of them at run time. The teacher's 64 most likely tokens of each position are computed once and kept on disk.
Some windows are not trained on: where the model is not closer to the source there, its weights stay as they were. The
pass comes after passes that remove weights and before quantizers.

A killed run goes on, and the minutes count once. The result depends on how much is trained within the minutes, so it
differs between machines and runs.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from optkit.calibration.samples import Calibration
from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.distillation.differentiable import Differentiable, trained_linears, why_not
from optkit.passes.distillation.teacher import Teacher
from optkit.passes.distillation.training import Training, mean_divergence
from optkit.passes.rewriting.stack import site_name

HELD_OUT = 8  # windows at most, a tenth of the text


class DistillConfig(Config):
    minutes: float = Field(
        30.0, gt=0, le=100_000, description="of training; the source's distributions come on top"
    )
    rank: int = Field(16, ge=1, le=1024, description="of the adapters")
    rate: float = Field(2e-3, gt=0, le=1, description="the highest learning rate")
    top: int = Field(64, ge=1, le=4096, description="tokens of a distribution that are kept")
    seed: int = Field(0, ge=0, description="of the adapters and of the order of the text")
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(samples=100), description="the text to train on"
    )


class Distill(Pass):
    name = "distill"
    stage = Stage.TRANSFORM
    exact = False
    Config = DistillConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the float linear layers of a graph that can be trained."""
        plan, reason = Plan(), why_not(graph)
        for node in trained_linears(graph):
            name = site_name(graph, node)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (node,)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        if graph.is_meta:
            return PassResult(len(plan.sites))
        teacher, stats = self.teacher(ctx), dict[str, Any]()
        held = max(1, min(HELD_OUT, len(teacher.windows) // 10))
        if len(teacher.windows) < 2:
            raise UserError("distill needs at least two samples of text", where="calibration.samples")
        trained, tested = (
            range(len(teacher.windows) - held),
            range(len(teacher.windows) - held, len(teacher.windows)),
        )
        student = Differentiable(graph, self.config.rank, self.config.seed)
        before = mean_divergence(student, teacher, tested)
        training = Training(
            student,
            teacher,
            trained,
            60 * self.config.minutes,
            self.config.rate,
            ctx.workspace,
            self.config.seed,
        )
        done = training.run(ctx.progress, self.name)
        after = mean_divergence(student, teacher, tested)
        stats |= {"steps": done.steps, "seconds": round(done.seconds, 1), "training_divergence": done.loss}
        stats |= {"divergence_before": before, "divergence_after": after, "undone": not after < before}
        if after < before:
            for site in plan.sites:
                graph.set_weight(ops.weight(site.nodes[0]), student.merged(site.nodes[0]))
        return PassResult(len(plan.sites) if after < before else 0, stats)

    def teacher(self, ctx: PassContext) -> Teacher:
        """The source model's distributions over the text.

        Raises:
            ValueError: the context has no source model.
        """
        if ctx.source is None:
            raise ValueError("this pass needs the source model, and the context has none")
        model = lower(ctx.source, ctx.target, dtype=torch.float32)

        def logits(window: list[int]) -> Tensor:
            inputs = dense_inputs([len(window)], torch.tensor(window), model.states)
            return model({name: value.to(model.device) for name, value in inputs.items()}).cpu()

        windows = ctx.calibration_windows(self.config.calibration)
        return Teacher(logits, windows, self.config.top, ctx.workspace)
