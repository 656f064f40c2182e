"""The search for the layers in float: growing sets of the most sensitive sites, each in the right record."""

from __future__ import annotations

import itertools

import pytest

from optkit.pipeline.fallback import MAX_SHARE, choices, with_fallback
from optkit.pipeline.records import PassRecord

LOSSES = {"a": 0.1, "b": 4.0, "c": 0.2, "d": 3.0, "e": 0.3, "f": 0.1, "g": 0.1, "h": 0.2}


@pytest.mark.parametrize(
    ("share", "first"), [(0.0, ["b"]), (0.4, ["b"]), (0.6, ["b", "d"]), (0.9, ["b", "d", "e"])]
)
def test_choices_begin_with_the_worst_sites_that_hold_the_share(share: float, first: list[str]) -> None:
    assert next(choices(LOSSES, share)) == first


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_choices_grow_up_to_half_of_the_sites(share: float) -> None:
    found = list(choices(LOSSES, share))
    assert all(set(before) < set(after) for before, after in itertools.pairwise(found))
    assert len(found[-1]) == len(LOSSES) * MAX_SHARE
    worst = sorted(LOSSES, key=lambda site: -LOSSES[site])
    assert all(sorted(sites) == sorted(worst[: len(sites)]) for sites in found)


def test_choices_are_empty_for_a_single_site() -> None:
    assert list(choices({"a": 1.0}, 0.5)) == []


def test_with_fallback_changes_the_last_quantizer_of_a_site() -> None:
    records = [
        PassRecord("smoothquant", {}, ["x"], [], decision="kept"),
        PassRecord("gptq", {}, ["x", "y"], [], decision="kept"),
        PassRecord("int8", {}, ["y"], [], decision="kept"),
        PassRecord("rtn", {}, ["x"], [], decision="rolled back"),
    ]
    found = with_fallback(records, ["x", "y"], {"gptq", "int8", "rtn"})
    assert [record.fallback for record in found] == [[], ["x"], ["y"], []]
    assert all(record.fallback == [] for record in records)
