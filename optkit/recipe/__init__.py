"""Recipes: schema, strict YAML, errors with line numbers.

The package is a function, too: ``optkit.recipe("ttft-cpu")`` is ``optkit.api.recipe.recipe``.
"""

from optkit.callable_package import make_callable

make_callable(__name__)
