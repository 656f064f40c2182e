"""The source of guesses of an engine: prompt lookup, trees, or a draft model in another artifact."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.graph.kv_layout import one_group
from optkit.graph.states import recurrent_of
from optkit.recipe.engine_options import NO_SPECULATION, EngineOptions, engine_options
from optkit.runtime.loaded import Model, device_of
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.proposer import Lengths, NgramProposer, Speculator
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.sizing import scheduler_config

if TYPE_CHECKING:
    from optkit.runtime.sampling.draft_model import DraftModel

logger = logging.getLogger(__name__)

Guesser: TypeAlias = Speculator | TreeSpeculator


def speculator(
    artifact: Artifact, model: Model, cost: CostModel, options: EngineOptions, *, branches: bool = False
) -> Guesser | None:
    """The source of guesses in ``speculative_model``: ``ngram``, ``suffix`` or another artifact; None without one.

    ``branches``: the model takes trees of guesses.
    """
    method = options.speculative_model
    if method in (None, NO_SPECULATION):
        return None
    refuse_recurrent(model, "wrong guesses can't be taken out of the model's recurrent state again")
    if method == "suffix":
        cached = options.speculative_cached_requests
        return TreeSpeculator(
            cost,
            options.num_speculative_tokens,
            branches=branches,
            recycles=device_of(model) is None,
            max_cached_requests=cached,
        )
    lengths = Lengths(cost, options.num_speculative_tokens)
    source = NgramProposer() if method == "ngram" else draft_model(artifact, method, model.vocab_size)
    return Speculator(source, lengths)


def refuse_recurrent(model: Model, reason: str) -> None:
    """Refuse speculation with a model with recurrent states.

    Raises:
        UserError: ``model`` has such a state.
    """
    if recurrent_of(model.states):
        raise UserError(
            reason, where="speculative_model", fix="leave out --speculative-model, or use another"
        )


def draft_model(artifact: Artifact, directory: str, vocab_size: int) -> DraftModel:
    """The draft model of another artifact with the same tokenizer. The draft's recipe sizes the draft model.

    Args:
        vocab_size: of the target model. Padding may make the two vocabularies differ in size.

    Raises:
        UserError: another tokenizer, or an artifact that cannot be loaded.
    """
    if not os.path.exists(directory):
        raise UserError(
            f"there is no artifact '{directory}'",
            where="--speculative-model",
            fix="suffix and ngram guess without a draft model; or give the path of an artifact",
        )
    draft = Artifact.open(directory)
    if tokenizer_of(artifact) != tokenizer_of(draft):
        raise UserError(
            "the draft model has another tokenizer",
            where=directory,
            fix="use ngram or another artifact",
        )
    from optkit.runtime.sampling.draft_model import DraftModel

    model = draft.executable()
    refuse_recurrent(model, "a draft model must not have a recurrent state, which can't take back guesses")
    options = engine_options(draft.recipe)
    if options.kv_cache_bytes is None:
        options = msgspec.structs.replace(options, kv_cache_bytes=draft.recipe.runtime.kv_cache_bytes)
    config = scheduler_config(model, options, draft.recipe.target, one_group(model.states))
    if model.vocab_size != vocab_size:
        logger.info(
            "the draft model has %d token ids, the model %d: guesses are among the ids of both",
            model.vocab_size,
            vocab_size,
        )
    runner = ModelRunner(model, config.num_blocks, config.block_size)
    return DraftModel(runner, config.max_model_len, config.max_num_batched_tokens, vocab_size)


def tokenizer_of(artifact: Artifact) -> bytes:
    """The bytes of the artifact's ``tokenizer.json``.

    Raises:
        UserError: there is no such file.
    """
    file = artifact.directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            "there is no tokenizer.json, so the ids of model and draft model can't be compared",
            where=str(artifact.directory),
            fix="use --speculative-model ngram",
        )
    return file.read_bytes()
