"""The interface of passes: closed options, abstract methods, and calibration text from the context."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from optkit.calibration.samples import Calibration
from optkit.graph.ir import Graph
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Stage
from tests.support.target import TARGET


class Options(Config):
    share: float = 0.5


class Half(Pass):
    """A pass without sites."""

    name, stage, Config = "half", Stage.TRANSFORM, Options

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        return Plan()

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        return PassResult(len(plan.sites))


def test_pass_has_the_defaults_of_its_options_unless_given() -> None:
    assert Half().config == Options(share=0.5)
    assert Half(Options(share=0.25)).config.share == 0.25


def test_options_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Options().share = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="sharre"):
        Options(sharre=1.0)  # type: ignore[call-arg]


def test_pass_without_apply_is_no_pass() -> None:
    class Unfinished(Pass):
        def check(self, graph: Graph, ctx: PassContext) -> Plan:
            return Plan()

    with pytest.raises(TypeError, match=r"abstract method '?apply"):
        Unfinished()  # type: ignore[abstract]


def test_calibration_windows_are_of_the_context_and_an_error_without_text() -> None:
    asked: list[Calibration] = []

    def text(config: Calibration) -> list[list[int]]:
        asked.append(config)
        return [[1, 2]]

    wanted = Calibration()
    assert PassContext(TARGET, text).calibration_windows(wanted) == [[1, 2]] and asked == [wanted]
    with pytest.raises(ValueError, match="needs calibration text"):
        PassContext(TARGET).calibration_windows(wanted)


def test_stages_are_in_the_order_of_a_recipe() -> None:
    assert sorted(Stage) == [Stage.FUSE, Stage.TRANSFORM, Stage.QUANTIZE, Stage.KERNELS, Stage.COMPILE]
