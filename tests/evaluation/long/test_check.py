"""The check of a recipe's bound on long documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.evaluation.long.check import check_long
from optkit.recipe.load import parse_recipe
from tests.support.model_directory import save_model

HEAD = "schema_version: 1\nname: test\n"
BOUND = "accept: {max_long_loss: 0.05}\nevaluation: {long_lengths: [8192, 4096]}\n"


def test_lengths_without_room_are_refused_before_the_run(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    check_long(parse_recipe(HEAD), directory, 64)  # no bound
    check_long(parse_recipe(HEAD + BOUND), directory, None)
    with pytest.raises(UserError, match="64 are too few"):
        check_long(parse_recipe(HEAD + BOUND), directory, 64)
