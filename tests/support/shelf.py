"""Artifacts without files, for tests that load engines and draft models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optkit.lowering.lower import lower
from optkit.recipe.load import load_recipe
from tests.support.graphs import captured

RECIPE = load_recipe(
    "ttft-h100", ["target=cpu", "runtime.max_num_batched_tokens=32", "runtime.max_num_seqs=4"]
)
VOCABULARIES = {"wide": 192}  # by the artifact's name; others have 128 ids


class Shelf:
    """Artifacts without files but a tokenizer, by their directories."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loaded = folder, list[str]()

    def put(self, name: str, tokenizer: str | None = "{}") -> str:
        directory = self.folder / name
        directory.mkdir()
        if tokenizer is not None:
            (directory / "tokenizer.json").write_text(tokenizer)
        return str(directory)

    def open(self, directory: str, *, verify: bool = True) -> Any:
        name = Path(directory).name
        vocab_size = VOCABULARIES.get(name, 128)

        def executable(**options: Any) -> Any:
            self.loaded.append(name)
            return lower(captured("llama", vocab_size=vocab_size))

        here = Path(directory)
        return SimpleNamespace(
            directory=here,
            recipe=RECIPE,
            executable=executable,
            native=here / "native",
            manifest={"plugins": {"own": {}}},
        )
