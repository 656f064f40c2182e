"""Embeddings: the hidden states in front of a model's output head, pooled to a vector for each text.

The graph without the head (``optkit.runtime.hidden_graph``) is lowered at the first use, over the packed weights of
the engine: memory holds a single copy. Texts lie in order in the flattened token batch of a step, without
padding, in a small KV pool apart from the pool of requests. The model is causal: the state of the last token has seen
the whole text, and the state of the first token nothing else.

Messages of texts wait in a queue, first come, first served. A step takes texts from the front, of one message or
several, up to a number of tokens that the engine sets anew for each step: small while requests generate. A text above
the number takes several steps, alone. An exception in the model fails a message only if the message also fails alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from optkit.cancellation import StepCancelled, cancellable
from optkit.graph.states import recurrent_of
from optkit.runtime.device_fault import is_device_fault
from optkit.runtime.pooling import MAX_TEXTS, Pooling
from optkit.runtime.runner import ModelRunner, ServableModel
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest

logger = logging.getLogger(__name__)

EMBEDDING_FAILED = "the model failed on these texts"


@dataclass(eq=False)
class Embedding:
    """The texts of a message, on the way to vectors.

    Attributes:
        prompts: token ids, at least one each.
        vectors: [hidden size] float32 of each text; None until computed.
        error: the reason why there will be none.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    pooling: Pooling
    vectors: list[np.ndarray | None] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self) -> None:
        self.vectors = [None] * len(self.prompts)

    @property
    def is_done(self) -> bool:
        """True when every text has a vector, or there is an error."""
        return self.error is not None or all(vector is not None for vector in self.vectors)

    def stacked(self) -> np.ndarray:
        """Vectors [prompts, hidden size] float32 of a finished message without an error."""
        return np.stack([vector for vector in self.vectors if vector is not None])


@dataclass(eq=False)
class Text:
    """A text of ``message``, with the states [T, hidden size] of its tokens so far."""

    message: Embedding
    index: int
    request: Request
    states: list[np.ndarray] = field(default_factory=list)

    def restart(self) -> None:
        self.request.num_computed = 0
        self.states.clear()


@dataclass
class Embedder:
    """Pooled hidden states of ``model``, a lowered ``hidden_graph``.

    Attributes:
        max_tokens: of a step.
        runner: the model on its KV pool, which grows to what a group needs; None before a group, and after a text
            longer than a step, whose pool may be as large as that of all requests.
    """

    model: ServableModel
    block_size: int
    max_tokens: int
    runner: ModelRunner | None = None
    _waiting: list[Text] = field(default_factory=list)
    _group: list[Text] = field(default_factory=list)  # in the KV pool
    _num_blocks: int = 0  # of the last group, when it was whole
    _alone: list[Text] = field(default_factory=list)  # of a group that failed

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._group or self._alone)

    def add(self, message: Embedding) -> None:
        """Queue the texts of ``message``."""
        for index, prompt in enumerate(message.prompts):
            received = EngineRequest(
                request_id=message.request_id,
                prompt_ids=(),
                sampling=SamplingParams(max_tokens=1),
                arrival=0.0,
            )
            self._waiting.append(Text(message, index, Request(received, list(prompt))))

    def abort(self, request_id: str) -> bool:
        """Drop the texts of a message; True if there were any."""
        queues = (self._waiting, self._group, self._alone)
        before = sum(map(len, queues))
        for queue in queues:
            queue[:] = [text for text in queue if text.message.request_id != request_id]
        self._give_back()
        return sum(map(len, queues)) < before

    def step(self, max_tokens: int, departed: Callable[[], AbstractSet[str]] = frozenset) -> list[Embedding]:
        """Compute up to ``max_tokens`` tokens; the messages that are finished.

        Args:
            departed: ids of messages without a client; called between parts of the model, and a step whose every
                message is in the result is cancelled.
        """
        limit = max(1, min(max_tokens, self.max_tokens))
        if not self._group:
            self._begin_group(limit)
        touched = dict.fromkeys(text.message for text in self._group)
        names = {message.request_id for message in touched}

        def check() -> None:
            if names <= departed():
                raise StepCancelled

        try:
            self._reserve()
            with cancellable(check):
                self._compute(limit)
        except StepCancelled:
            return []
        except Exception as error:
            if is_device_fault(error):
                raise  # the device is gone for everyone
            logger.exception("the model failed on %d texts to embed", len(self._group))
            self._fail()
        done = [message for message in touched if message.is_done]
        for message in done:
            self.abort(message.request_id)  # texts left of one that failed
        self._give_back()
        return done

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
        """Vectors [prompts, hidden size] float32, without the queue.

        Args:
            prompts: token ids, at least one each.
            pooling: the state of the ``last`` token, the ``mean`` of all, or that of the first token (``cls``).

        Raises:
            RuntimeError: the model failed.
        """
        message = Embedding("embed", prompts, pooling)
        self.add(message)
        while not message.is_done:
            self.step(self.max_tokens)
        if message.error:
            raise RuntimeError(message.error)
        return message.stacked()

    def _begin_group(self, limit: int) -> None:
        """Move texts from the front of the queue to the KV pool; a text above ``limit`` tokens is alone."""
        if self._alone:
            group = [self._alone.pop(0)]
        else:
            count = total = 0
            for text in self._waiting[:MAX_TEXTS]:
                total += len(text.request.token_ids)
                if count and total > limit:
                    break
                count += 1
            group, self._waiting = self._waiting[:count], self._waiting[count:]
        first = 0
        for slot, text in enumerate(group):
            count = -(-len(text.request.token_ids) // self.block_size)
            text.request.block_tables = [list(range(first, first + count))]
            text.request.state_slot = slot
            first += count
        self._group, self._num_blocks = group, first

    def _give_back(self) -> None:
        """Free the pool after a group with more blocks than any group that fits a step."""
        if not self._group and self._num_blocks > self.max_tokens // self.block_size + MAX_TEXTS:
            self.runner = None

    def _reserve(self) -> None:
        """Make a pool with room for the group; the KV of a larger pool stays."""
        slots = len(self._group) if recurrent_of(self.model.states) else 0
        runner, num_blocks = self.runner, self._num_blocks
        if runner is None or runner.num_blocks < num_blocks or runner.num_slots < slots:
            self.runner = ModelRunner(self.model, num_blocks, self.block_size, num_slots=slots)

    def _compute(self, limit: int) -> None:
        """Run the model on up to ``limit`` tokens of the group, and pool the texts that are complete."""
        items: list[tuple[Text, ScheduledRequest]] = []
        for text in self._group:
            count = min(text.request.num_pending, limit)
            if count:
                every = text.message.pooling != "last"
                items.append((text, ScheduledRequest(text.request, count, all_logits=every)))
                limit -= count
        assert self.runner is not None
        rows = self.runner.execute(Batch(tuple(item for _, item in items)))
        ends = np.cumsum([item.num_logits for _, item in items])[:-1]
        for (text, item), piece in zip(items, np.split(rows, ends), strict=True):
            text.states.append(piece)
            text.request.num_computed += item.num_new
            if not text.request.num_pending:
                self._finish(text)
        self._group = [text for text in self._group if text.request.num_pending]

    def _finish(self, text: Text) -> None:
        """Pool a complete text; a vector with NaN or infinity is a failure of the message."""
        message, vector = text.message, pooled(np.concatenate(text.states), text.message.pooling)
        if np.isfinite(vector).all():
            message.vectors[text.index] = vector
        else:
            message.error = message.error or EMBEDDING_FAILED

    def _fail(self) -> None:
        """After an exception: the texts of the group start over, each alone; a text alone fails the message."""
        group, self._group = self._group, []
        if len(group) > 1:
            for text in group:
                text.restart()
            self._alone += group
            return
        for text in group:
            text.message.error = EMBEDDING_FAILED


def pooled(rows: np.ndarray, pooling: Pooling) -> np.ndarray:
    """The vector [hidden size] of the states [T, hidden size] of a text."""
    if pooling == "mean":
        mean: np.ndarray = rows.mean(0, dtype=np.float64).astype(np.float32)
        return mean
    vector: np.ndarray = rows[-1] if pooling == "last" else rows[0]
    return vector


MakeEmbedder = Callable[[], Embedder]  # at the first use
