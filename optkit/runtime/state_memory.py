"""Memory of the states that a model keeps, by the options of a recipe, without an engine."""

from __future__ import annotations

from typing import Any

from optkit.errors import UserError
from optkit.graph.kv_layout import kv_layout
from optkit.graph.states import sequence_bytes, token_bytes
from optkit.recipe.engine_options import engine_options
from optkit.recipe.schema import Recipe
from optkit.runtime.kv.pools import memory_plan
from optkit.runtime.sizing import HasStates, num_blocks, num_states


def state_memory(meta: HasStates, recipe: Recipe) -> dict[str, Any]:
    """Bytes that the layers keep of a token and of a sequence, and what the recipe's ``kv_cache_bytes`` holds of both.

    A GPU holds what fits the memory that is left, so there the numbers are unknown.
    """
    options = engine_options(recipe)
    known = {"token_bytes": token_bytes(meta.states), "sequence_bytes": sequence_bytes(meta.states)}
    if options.kv_cache_bytes is None or not meta.states:
        return known
    slots, checkpoints = num_states(meta, options)
    layout = kv_layout(meta.states)
    try:
        blocks = num_blocks(meta, options, slots, checkpoints, layout)
    except UserError as error:  # optkit serve refuses it, too
        return known | {"refusal": error.what}
    plan = memory_plan(blocks, options.block_size, 0, meta.max_model_len, "", layout.windows)
    tokens = {"kv_tokens": plan.num_tokens} if meta.kv_specs else {}
    recurrent = {"state_slots": slots, "state_checkpoints": checkpoints} if known["sequence_bytes"] else {}
    return known | tokens | recurrent
