"""optkit: a compiler-driven optimization toolkit for language models.

Importing the package is cheap by design: neither torch nor transformers is imported, so ``optkit --help`` answers at
once. Import from the submodules:

- ``optkit.capture.capture``: a Hugging Face causal LM becomes an ``optkit.graph.ir.Graph``;
- ``optkit.passes``: the table of graph passes;
- ``optkit.pipeline.driver``: check, apply, verify, predict, measure, keep or roll back;
- ``optkit.artifact``: write, verify and open the artifact directory;
- ``optkit.runtime``: the engine for serving an artifact.
"""

from optkit.version import VERSION as __version__

__all__ = ["__version__"]
