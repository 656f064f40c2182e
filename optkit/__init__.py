"""optkit: a compiler-driven optimization toolkit for language models.

Importing this package is cheap by design: it pulls in neither torch nor transformers, so that
``optkit --help`` answers at once. Import what you need from the submodules:

- ``optkit.capture``   a Hugging Face causal LM becomes an ``optkit.graph.Graph``
- ``optkit.passes``    the table of graph passes
- ``optkit.pipeline.driver``  the driver: check, predict, apply, verify, measure, keep or roll back
- ``optkit.artifact``           the directory that is written, verified and opened again
- ``optkit.runtime``   the engine that serves it
"""

from optkit.version import VERSION as __version__

__all__ = ["__version__"]
