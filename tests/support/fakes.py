"""An engine without a model, for tests: the output depends on every token and on the place of its KV."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from optkit.cancellation import check_cancelled
from optkit.errors import UserError
from optkit.fleet.mock import TokenKV
from optkit.kernels.cpu import native
from optkit.kernels.cpu.decode_steps import Choice, Outlet
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.draft_tree import DraftTree
from optkit.runtime.embedding import Embedder
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import MemoryBlocks
from optkit.runtime.sampling import sampler
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.structured.compiler import Grammars
from optkit.runtime.types import Batch, Failure, ScheduledRequest, StateCopy
from tests.support.tiny_tokenizer import fast_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NO_STATE = 0xBAD


class FakeRunner(TokenKV):
    """A runner with logits from a hash of the sequence's tokens *as read back through the block table* (``TokenKV``).

    A token in a wrong slot, a block with two owners, a skipped chunk and a chunk at a wrong position change the
    output. So comparing with a solo run checks all KV bookkeeping.

    With ``num_states`` the runner also keeps a recurrent state in that many slots, a hash of the tokens that were run
    through the slot, and the output depends on it: a state from other tokens, or advanced twice, changes the output.

    Attributes:
        script: tokens to return in turn, in place of hashed logits.
        poison_token: ``execute`` raises for a prompt with the token.
        nan_token: a prompt with the token gets NaN logits.
        die_token: a prompt with the token ends the process.
        remember: keep all batches; off for a server under load.
        is_multi_step: several decode steps in a call, at times ended early as by an arrival.
        sent: the frames of the steps in a call, in place of a socket.
        slow_token: for a prompt with the token ``execute`` creates the file ``until.begun`` and computes until the
            file ``until`` exists, without a pause or, with ``parts``, in parts.
    """

    kv_bytes, kv_dtype, weight_bytes, state_bytes, num_ranks = 0, "float32", 0, 0, 1

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        return 0

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 64,
        step_delay: float = 0.0,
        script: list[int] | None = None,
        poison_token: int | None = None,
        nan_token: int | None = None,
        die_token: int | None = None,
        remember: bool = True,
        slow_token: int | None = None,
        until: str = "",
        parts: bool = False,
        num_states: int = 0,
        windows: tuple[int, ...] = (0,),
        multi_step: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size, windows)
        self.is_multi_step = multi_step
        self.sent: list[bytes] = []
        self.slow_token, self.until, self.parts = slow_token, Path(until), parts
        self.vocab_size, self.step_delay, self.script = vocab_size, step_delay, script
        self.poison_token, self.nan_token, self.die_token = poison_token, nan_token, die_token
        self.states = [NO_STATE] * num_states
        self.remember = remember
        self.batches: list[Batch] = []

    def execute(self, batch: Batch) -> np.ndarray:
        if self.step_delay:
            time.sleep(self.step_delay)
        if self.remember:
            self.batches.append(batch)
        starts = [self._advance(item) for item in batch.items]
        seen = [self.write_and_read(item) for item in batch.items]
        check_cancelled()
        if any(self.slow_token in item.request.token_ids for item in batch.items):
            self._compute_for_long()
        rows = [
            self._logits(item, before(item, ids, back), depth_of(item, back), start)
            for item, ids, start in zip(batch.items, seen, starts, strict=True)
            for back in reversed(range(item.num_logits))
        ]
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size), dtype=np.float32)

    def decode(self, batch: Batch, choice: Choice, outlet: Outlet) -> np.ndarray:
        """Steps of ``execute`` on copies of the requests, with the tokens of the sampler of single steps."""
        copies = [
            replace(item.request, token_ids=list(item.request.token_ids), counts=None) for item in batch.items
        ]
        steps = list[list[int]]()
        while len(steps) < batch.num_steps:
            for copy, number in zip(copies, choice.uniforms[len(steps)], strict=True):
                p = copy.sampling
                assert number == (sampler.uniform(p.seed, copy.num_output) if p.temperature else 0.0)
            try:
                logits = self.execute(Batch(tuple(ScheduledRequest(copy, 1) for copy in copies)))
            except RuntimeError:
                break
            tokens = sampler.sample(logits, copies)
            if any(isinstance(token, Failure) for token in tokens):
                break
            steps.append(cast("list[int]", tokens))
            stops = any(token in stop for token, stop in zip(steps[-1], choice.stops, strict=True))
            if stops or len(steps) == batch.num_steps or sum(steps[-1]) % 5 == 0:
                break
            if outlet.sink >= 0:
                self.sent.append(outlet.filled(steps[-1]))
            for copy, token in zip(copies, steps[-1], strict=True):
                copy.num_computed = len(copy.token_ids)
                copy.token_ids.append(token)
        return np.array(steps, np.int64).reshape(len(steps), len(copies))

    def _compute_for_long(self) -> None:
        self.until.with_suffix(".begun").touch()
        while not self.until.exists():
            sum(range(10_000))
            if self.parts:
                check_cancelled()

    def write_and_read(self, item: ScheduledRequest) -> np.ndarray:
        ids = super().write_and_read(item)
        if self.poison_token in item.request.token_ids:
            raise RuntimeError("poisoned")
        if self.die_token in item.request.token_ids:
            os.kill(os.getpid(), signal.SIGSEGV)  # as native code that fails does
        return ids

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        for copy in copies:
            self.states[copy.to] = self.states[copy.source]

    def _advance(self, item: ScheduledRequest) -> int | None:
        """Run the new tokens of ``item`` through its state; the state before, or None without states."""
        if not self.states:
            return None
        request = item.request
        start = self.states[request.state_slot] if request.num_computed else 0
        self.states[request.state_slot] = zlib.crc32(
            np.array(item.new_tokens, dtype=np.int64).tobytes(), start
        )
        return start

    def _logits(
        self, item: ScheduledRequest, ids: np.ndarray, num_ahead: int, start: int | None = None
    ) -> np.ndarray:
        """Logits after the tokens ``ids``; the last ``num_ahead`` of the tokens are guesses.

        ``start`` is the recurrent state before the new tokens.
        """
        new = ids[item.request.num_computed :]
        if start is not None and zlib.crc32(new.tobytes(), start) != zlib.crc32(ids.tobytes()):
            ids = np.append(ids, start)  # the state is of other tokens
        if self.nan_token in item.request.token_ids:
            return np.full(self.vocab_size, np.nan, dtype=np.float32)
        logits = self.logits_after(ids)
        if self.script:
            logits[self.script[(item.request.num_output + num_ahead) % len(self.script)]] = 1e4
        return logits

    def logits_after(self, ids: np.ndarray) -> np.ndarray:
        """Logits [V] of the token after ``ids``."""
        random = np.random.default_rng(zlib.crc32(ids.tobytes()))
        return random.standard_normal(self.vocab_size, dtype=np.float32)


def before(item: ScheduledRequest, ids: np.ndarray, back: int) -> np.ndarray:
    """The tokens of ``ids`` seen by the row ``back`` before the last: all tokens before, or a branch of a tree."""
    if not isinstance(item.draft, DraftTree):
        return ids[: len(ids) - back]
    root, node = len(ids) - len(item.draft) - 1, len(item.draft) - back
    depths, seen = (0, *item.draft.depths), list[int]()
    for row in range(node, -1, -1):
        if row == node or depths[row] == depths[seen[-1]] - 1:
            seen.append(row)
    return np.concatenate((ids[:root], ids[[root + row for row in reversed(seen)]]))


def depth_of(item: ScheduledRequest, back: int) -> int:
    """The number of guesses seen by the row ``back`` before the last."""
    node = len(item.draft) - back
    return item.draft.depths[node - 1] if isinstance(item.draft, DraftTree) and node else node


def engine_from_json(artifact_dir: str, options: EngineOptions) -> Engine:
    """The factory of the engine process: ``artifact_dir`` is the options of ``fake_engine`` as JSON."""
    return fake_engine(options=json.loads(artifact_dir or "{}"))


def fake_engine(options: dict[str, Any] | None = None) -> Engine:
    """An ``Engine`` on a ``FakeRunner``.

    ``options`` are fields of ``SchedulerConfig`` and arguments of ``FakeRunner``. For the process tests there are
    ``embeds``: options of ``fake_embedder``, without which there are no embeddings. For the process tests there are
    also ``load_error``: "user" or "bug", ``load_delay``: seconds, ``faults``: token -> place to break (``inject``).
    """
    options = dict(options or {})
    faults = options.pop("faults", {})
    embeds: dict[str, Any] = options.pop("embeds", {})
    time.sleep(options.pop("load_delay", 0))
    match options.pop("load_error", None):
        case "user":
            raise UserError("the artifact is broken", where="there", fix="build it again")
        case "bug":
            raise KeyError("weights")
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 64,
    }
    names = set(SchedulerConfig.__struct_fields__)
    config = SchedulerConfig(**limits | {name: options.pop(name) for name in names & options.keys()})
    states = config.num_state_slots and config.num_state_slots + config.num_checkpoints
    sizes = {"num_blocks": config.num_blocks, "block_size": config.block_size}
    runner = FakeRunner(**sizes, num_states=states, windows=config.kv_windows, **options)
    slots = config.num_host_blocks
    engine = Engine(runner, config, store=MemoryBlocks(slots, runner.read_block(0).nbytes) if slots else None)
    engine.grammars = Grammars(lambda: tiny_vocabulary(runner.vocab_size))
    if embeds:
        engine.make_embedder = lambda: fake_embedder(engine, embeds)
    if slots:
        engine.scheduler.kv.worth_saving = lambda: True  # a fake computes faster than anything can be copied
    for token, place in faults.items():
        inject(engine, int(token), place)
    return engine


def fake_embedder(engine: Engine, options: dict[str, Any]) -> Embedder:
    """An embedder on ``FakeRunner``: the state of a token is a hash of the tokens up to there.

    ``options`` are arguments of ``FakeRunner``; ``vocab_size`` is the size of a vector.
    """
    c = engine.config
    runner: Any = FakeRunner(4 * c.num_blocks, c.block_size, **options)
    runner.num_slots = 0
    model: Any = SimpleNamespace(states=())
    return Embedder(model, c.block_size, c.max_num_batched_tokens, runner)


def tiny_vocabulary(size: int) -> LLTokenizer:
    """The tokens of ``tests.support.tiny_tokenizer``."""
    from optkit.runtime.structured import grammar

    return grammar.vocabulary(fast_tokenizer().to_str(), size)


def inject(engine: Engine, token: int, place: str) -> None:
    """Make ``place`` raise on sequences with ``token`` in the prompt."""
    owners: dict[str, tuple[Any, str]] = {
        "sampler": (sampler, "native_row" if native.available() else "sample_row"),
        "arrival": (engine.scheduler.policy, "rank"),
        "admission": (engine.scheduler.kv, "admit"),
        "growth": (engine.scheduler.kv, "grow"),
        "update": (engine.scheduler.kv, "publish"),
    }
    owner, name = owners[place]
    original = getattr(owner, name)

    def broken(*args: Any) -> Any:
        for arg in args:
            request = getattr(arg, "received", arg)
            if token in getattr(request, "prompt_ids", ()):
                raise RuntimeError(f"injected into {name}")
        return original(*args)

    setattr(owner, name, broken)
