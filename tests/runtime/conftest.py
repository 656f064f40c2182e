"""In the runtime a warning (an overflow, an invalid value) is an error; and artifacts without files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shelf import Shelf

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Artifacts that engines and draft models are loaded from."""
    made = Shelf(tmp_path)
    for module in ("factory", "speculation"):
        monkeypatch.setattr(f"optkit.runtime.{module}.Artifact", made)
    return made
