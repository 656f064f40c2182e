"""A mock engine: the real scheduler, KV manager and prefix cache over a runner that sleeps in place of computing.

For tests and measurements of everything around the model: many replicas fit a small machine, and a step takes the
seconds of a cost model. Two properties make mistakes visible:

- The KV of a token is the token. Logits are a hash of *all* tokens of a sequence as read back through the block table,
  so KV of a wrong prompt, of a wrong place or damaged in a transfer changes the answer.
- The hash depends on nothing else. So a replica that goes on with another replica's answer gives the same tokens.

``factory`` builds the engine inside an engine process, for ``EngineClient(..., factory=MOCK_FACTORY)``;
``mock_engine`` builds the engine in the same process, with the sleep and the clock of a test.
"""

from __future__ import annotations

import operator
import os
import select
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from optkit.cancellation import check_cancelled
from optkit.errors import UserError
from optkit.kernels.cpu import native, sampling
from optkit.kernels.cpu.decode_steps import Choice, Outlet
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.draft_tree import Move
from optkit.runtime.engine import Engine
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.structured.compiler import Grammars, vocabulary
from optkit.runtime.types import Batch, BlockCopy, ScheduledRequest, StateCopy
from optkit.simulation.step_costs import StepCosts, taught_cost_model

MOCK_FACTORY = "optkit.fleet.mock:factory"
MOCK_FILE = "mock.json"  # of an artifact directory
SLEEP_SECONDS = 0.02  # between two looks for a cancelled step
NUM_LIKELY = 16  # tokens with a chance to follow
UNLIKELY = -60.0  # logit of all other tokens: out of reach of a draw
EMPTY = -1
GOLDEN, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def set_likely(logits: np.ndarray, likely: np.ndarray) -> None:
    """Raise the logits [vocab_size] of the tokens ``likely``, the first the most."""
    logits[likely[::-1]] = np.arange(NUM_LIKELY, dtype=np.float32) / 4


def is_sent(descriptor: int, frame: bytes) -> bool:
    """Write ``frame`` to a socket; False where the other end is gone."""
    left = memoryview(frame)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        return False
    return True


class EngineKilled(BaseException):
    """The death of a mock engine that has no process; no ``Exception``, which an engine survives."""


class MockModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about a model that a mock engine needs.

    Attributes:
        step_seconds: of every step, so about the time per output token.
        prompt_tokens_per_second: computed beside that; a token of a running answer takes as long as one of a prompt.
        row_seconds: of each row of logits.
        pair_seconds: of each pair of a prompt's token and an earlier token.
        context_seconds: of each earlier token of a decoding request.
        lowest_token: the smallest token id of an answer; smaller ids are special tokens of most tokenizers.
        num_blocks: of the KV pool.
        load_seconds: time of loading.
        answers: another number stands for other weights, and gives other answers.
        die_token: a request with the token in its prompt ends the process, as native code that fails does.
        die_after: tokens of the answer after which ``die_token`` does so.
    """

    step_seconds: float = 0.010
    prompt_tokens_per_second: float = 3000.0
    row_seconds: float = 0.0
    pair_seconds: float = 0.0
    context_seconds: float = 0.0
    vocab_size: int = 512
    lowest_token: int = 32
    max_model_len: int = 8192
    num_blocks: int = 2048
    load_seconds: float = 0.0
    answers: int = 0
    die_token: int | None = None
    die_after: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.lowest_token < self.vocab_size:
            raise ValueError(f"lowest_token must be in [0, {self.vocab_size}), got {self.lowest_token}")
        if self.prompt_tokens_per_second <= 0:
            raise ValueError("prompt_tokens_per_second must be above 0")

    @property
    def costs(self) -> StepCosts:
        """The seconds of steps."""
        token = 1 / self.prompt_tokens_per_second
        return StepCosts(
            (self.step_seconds, token, token, self.row_seconds, self.pair_seconds, self.context_seconds)
        )

    def answer(self, prompt: Sequence[int], length: int) -> list[int]:
        """The greedy answer of ``length`` tokens to ``prompt``, without stop tokens and without an engine."""
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(self.likely_after(np.array(ids, dtype=np.int64))[0]))
        return ids[len(prompt) :]

    def likely_after(self, ids: np.ndarray) -> np.ndarray:
        """The tokens [``NUM_LIKELY``] that may follow ``ids`` [n] int64, the most likely first; some may repeat."""
        seed = zlib.crc32(ids.tobytes(), self.answers)
        mixed = np.arange(1, NUM_LIKELY + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(MIX)  # splitmix64, which wraps around
        mixed ^= mixed >> np.uint64(27)
        return (mixed % np.uint64(self.vocab_size - self.lowest_token)).astype(np.int64) + self.lowest_token


class TokenKV:
    """A KV pool in which the KV of a token is the token.

    With several ``windows`` a token is kept in a block of each group of layers, with the number of the group. A token
    missing in the window of a query changes what ``write_and_read`` returns; to read a block given back is an error.
    """

    is_multi_step = False

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int, ...] = (0,)) -> None:
        self.num_blocks, self.block_size, self.kv_windows = num_blocks, block_size, windows
        self.slots = np.full(num_blocks * block_size, EMPTY, dtype=np.int64)

    def read_block(self, block: int) -> np.ndarray:
        return self.slots[block * self.block_size : (block + 1) * self.block_size].view(np.uint8).copy()

    def write_block(self, block: int, data: np.ndarray) -> None:
        self.slots[block * self.block_size : (block + 1) * self.block_size] = data.view(np.int64)

    def move_tokens(self, moves: Sequence[Move]) -> None:
        for move in moves:
            source, target = (self._at(move.table, places) for places in (move.sources, move.targets))
            for a, b in zip(source, target, strict=True):
                self.slots[b] = self.slots[a]

    def _at(self, table: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [table[at // self.block_size] * self.block_size + at % self.block_size for at in positions]

    def copy_block(self, copy: BlockCopy) -> None:
        rows = self.slots.reshape(self.num_blocks, self.block_size)
        rows[copy.to] = rows[copy.source]

    def write_and_read(self, item: ScheduledRequest) -> np.ndarray:
        """Write the new tokens of ``item``; the tokens [n] int64 of the sequence up to there, as read back."""
        for at, token in enumerate(item.sinks):
            self.slots[item.request.block_tables[0][0] * self.block_size + at] = token
        request, groups = item.request, len(self.kv_windows)
        places = [self._slots(item, group) for group in range(groups)]
        for group, slots in enumerate(places):
            self.slots[slots[len(slots) - item.num_new :]] = np.array(item.new_tokens) * groups + group
        if groups == 1 and not self.kv_windows[0]:
            return self.slots[places[0]]
        known = np.array([*request.token_ids[: request.num_computed], *item.new_tokens], dtype=np.int64)
        ids = self.slots[places[0]] // groups if not self.kv_windows[0] else known
        for group, slots in enumerate(places):
            found, wanted = self.slots[slots], known[len(known) - len(slots) :] * groups + group
            if self.kv_windows[group] and (found != wanted).any():
                ids = np.append(ids, found)
        return ids

    def _slots(self, item: ScheduledRequest, group: int) -> np.ndarray:
        """The slots of the tokens that the queries of ``item`` read in ``group``."""
        start, window = item.request.num_held, self.kv_windows[group]
        positions = np.arange(max(0, start - window + 1) if window else 0, start + item.num_new)
        blocks = np.array(item.request.block_tables[group])[positions // self.block_size]
        if (blocks < 0).any():
            raise RuntimeError("a block was given back too early")
        return blocks * self.block_size + positions % self.block_size


class MockRunner(TokenKV):
    """The runner of a mock engine.

    Args:
        sleep: waits for the rest of a step's seconds.
        clock: seconds; the time of computing a step is a part of the step's seconds.
        die: ends the engine, for ``MockModel.die_token``.
        may_multi_step: several decode steps may run in a call, as in the runner of a saved model.
    """

    kv_dtype, weight_bytes, state_bytes, num_ranks = "int64", 0, 0, 1

    def __init__(
        self,
        model: MockModel,
        config: SchedulerConfig,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        die: Callable[[], None],
        may_multi_step: bool = False,
    ) -> None:
        super().__init__(config.num_blocks, config.block_size)
        self.kv_bytes = self.slots.nbytes
        self.is_multi_step = may_multi_step and model.die_token is None and native.available()
        self.model, self.vocab_size = model, model.vocab_size
        self._costs, self._sleep, self._clock, self._die = model.costs, sleep, clock, die

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        return 0

    def execute(self, batch: Batch) -> np.ndarray:
        """Logits [sum of num_logits, vocab_size] float32, after the seconds of the step."""
        end = self._clock() + self._costs.step(batch.items)
        if self.model.die_token is not None and any(map(self._is_deadly, batch.items)):
            self._die()
        found = np.full((sum(item.num_logits for item in batch.items), self.vocab_size), UNLIKELY, np.float32)
        row = 0
        for item in batch.items:
            ids = self.write_and_read(item)
            for back in reversed(range(item.num_logits)):
                set_likely(found[row], self.model.likely_after(ids[: len(ids) - back]))
                row += 1
        self._wait(end)
        return found

    def decode(self, batch: Batch, choice: Choice, outlet: Outlet) -> np.ndarray:
        """The tokens [n, S] int64 of up to ``batch.num_steps`` steps, by the rules of ``decode_steps.decode``."""
        seconds, tokens = self._costs.step(batch.items), list[list[int]]()
        slots = [self._slots(replace(item, num_new=batch.num_steps), 0) for item in batch.items]
        last = [item.new_tokens[0] for item in batch.items]
        logits = np.empty((len(slots), self.vocab_size), np.float32)
        for uniforms in choice.uniforms.tolist():
            end = self._clock() + seconds
            for row, places, token in zip(logits, slots, last, strict=True):
                ids = places[: len(places) - batch.num_steps + len(tokens) + 1]
                self.slots[ids[-1]] = token
                row[:] = UNLIKELY
                set_likely(row, self.model.likely_after(self.slots[ids]))
            last = sampling.choose(choice.rows(logits, uniforms), self.vocab_size)
            self._sleep(max(0.0, end - self._clock()))
            tokens.append(last)
            if len(tokens) == len(choice.uniforms) or any(map(operator.contains, choice.stops, last)):
                break
            if outlet.watched and select.select(outlet.watched, [], [], 0)[0]:
                break
            if outlet.sink >= 0 and not is_sent(outlet.sink, outlet.filled(last)):
                break
        return np.array(tokens, np.int64)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Do nothing: there is no recurrent state."""

    def _is_deadly(self, item: ScheduledRequest) -> bool:
        late, asked = item.request.num_output >= self.model.die_after, item.request.received
        return late and self.model.die_token in asked.prompt_ids[: asked.num_prompt]

    def _wait(self, end: float) -> None:
        """Sleep until ``end``, in parts between which the step can be cancelled."""
        check_cancelled()
        while (left := end - self._clock()) > 0:
            self._sleep(min(left, SLEEP_SECONDS))
            check_cancelled()


def mock_engine(
    model: MockModel,
    options: EngineOptions | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    die: Callable[[], None] | None = None,
    may_multi_step: bool = False,
) -> Engine:
    """A mock engine, which knows the seconds of steps from the beginning.

    Args:
        options: ``kv_cache_bytes`` is replaced by ``MockModel.num_blocks``, and speculation is not there.
        sleep, clock, die, may_multi_step: of ``MockRunner``; ``sleep(s)`` moves ``clock`` on by about ``s`` seconds.
            By default the process sleeps, and dies.
    """
    options = options or EngineOptions()
    config = SchedulerConfig(
        **options.scheduling(),
        max_model_len=min(options.max_model_len or model.max_model_len, model.max_model_len),
        num_blocks=model.num_blocks,
        prefill_target_tokens=256,
    )
    runner = MockRunner(model, config, sleep, clock, die or end_process, may_multi_step)
    return Engine(runner, config, clock=clock, cost=taught_cost_model(model.costs.alone))


def end_process() -> None:
    """End the process as native code that fails does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def read_model(artifact_dir: str) -> MockModel:
    """The mock model of a JSON text, or of the file ``mock.json`` in a directory, else the defaults.

    The vocabulary of a directory's ``config.json`` is the default of ``vocab_size``, so tokenizer and engine agree.

    Raises:
        UserError: the JSON is no ``MockModel``.
    """
    text, where, values = artifact_dir or "{}", "the mock model", dict[str, Any]()
    try:
        if not _is_json(artifact_dir):
            file, config = Path(artifact_dir) / MOCK_FILE, Path(artifact_dir) / "config.json"
            text, where = file.read_text() if file.is_file() else "{}", str(file)
            if config.is_file():
                values["vocab_size"] = msgspec.json.decode(config.read_bytes(), type=_Vocabulary).vocab_size
        values |= msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.convert(values, MockModel)
    except msgspec.MsgspecError as error:
        fields = ", ".join(MockModel.__struct_fields__)
        raise UserError(str(error), where=where, fix=f"the fields are {fields}") from error


class _Vocabulary(msgspec.Struct):
    """The part of ``config.json`` that a mock model needs."""

    vocab_size: int


def _is_json(artifact_dir: str) -> bool:
    return not artifact_dir or artifact_dir.lstrip().startswith("{")


def factory(artifact_dir: str, options: EngineOptions) -> Engine:
    """The factory of an engine process; ``artifact_dir`` as in ``read_model``."""
    model = read_model(artifact_dir)
    time.sleep(model.load_seconds)
    engine = mock_engine(model, options, may_multi_step=True)
    if not _is_json(artifact_dir):
        engine.grammars = Grammars(
            partial(vocabulary, Path(artifact_dir) / "tokenizer.json", model.vocab_size)
        )
    return engine
