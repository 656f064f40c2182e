"""GraphRunner: runs steps from static buffers, as captured graphs where possible, and samples on the device.

A step is: a copy of the inputs (``layout``), the tokens sampled by the step before placed among the input ids, the
model, the sampler. The graph contains all parts. ``execute`` returns logits, for sampling on the host; ``launch``
queues the work and returns a ``PendingStep``.

Host buffers come in pairs: while the device may still copy from the first, the next step is written into the second.
Two suffice for a step in flight beside the planned step; an earlier write waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optkit.graph.ir import BATCH_INPUTS
from optkit.graph.kv_layout import KVLayout
from optkit.graph.states import STATE_SLOTS
from optkit.kernels import reference
from optkit.kernels.whole_prompt import WholePrompt, whole_prompt
from optkit.runtime.cuda.buckets import Buckets
from optkit.runtime.cuda.device import Device, Event, Replay
from optkit.runtime.cuda.layout import SAMPLING_INPUTS, Layout, StepShape, capacity
from optkit.runtime.cuda.pools import DevicePools
from optkit.runtime.cuda.sampling import FAILED, Sampler, has_filters, sampling_inputs
from optkit.runtime.kv.pools import Pools
from optkit.runtime.runner import ModelRunner, ServableModel, sinks_of, state_slots
from optkit.runtime.sampling.sampler import BAD_LOGITS
from optkit.runtime.types import PENDING, Batch, Failure, ScheduledRequest

GraphKey = tuple[StepShape, bool, bool]  # a shape, filters or none, whole prompt or not
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True)
class CapturedStep:
    """A graph, the inputs and their layout."""

    layout: Layout
    inputs: Tensor
    replay: Replay


class Staging:
    """A pinned buffer, written only after the device has copied the content before."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.copied: Event | None = None

    def writable(self, num_bytes: int) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        return self.buffer[:num_bytes]


class QueuedStep:
    """A queued step; see ``optkit.runtime.overlap.PendingStep``."""

    def __init__(self, done: Event, sampled: Tensor) -> None:
        self._done, self._sampled = done, sampled

    def result(self) -> list[int | Failure]:
        self._done.synchronize()
        return [BAD_LOGITS if token == FAILED else token for token in self._sampled.tolist()]


class GraphRunner(ModelRunner):
    """Runs batches on ``model``, whose weights are on ``device``.

    Args:
        largest: shape of the largest step, which sizes the buffers.
        sample: ``reference.sample`` or a kernel of the op.
    """

    def __init__(
        self,
        model: ServableModel,
        num_blocks: int,
        block_size: int,
        device: Device,
        largest: StepShape,
        sample: Sampler = reference.sample,
        num_slots: int = 0,
        layout: KVLayout | None = None,
    ) -> None:
        self.device = device.torch_device
        self._call_model: Any = model  # of torch
        super().__init__(model, num_blocks, block_size, self.device, num_slots, layout)
        self.further = tuple(self.layout.further_inputs.items())
        self.gpu, self.largest, self.sample = device, largest, sample
        self.max_model_len = model.max_model_len
        self.buckets = Buckets((), (), largest.sequences, largest.blocks)
        self._graphs: dict[GraphKey, CapturedStep] = {}
        size = capacity(largest, self.further)
        self._staging = itertools.cycle([Staging(device.pinned(size)) for _ in range(STEPS_IN_FLIGHT)])
        self._eager_inputs = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._sampled = torch.zeros(largest.tokens, dtype=torch.int64, device=self.device)
        self._results = itertools.cycle(
            [device.pinned(8 * largest.sequences).view(torch.int64) for _ in range(STEPS_IN_FLIGHT)]
        )
        self._rows: dict[int, int] = {}  # id of a request: its row among the last sampled tokens
        self.num_captures = self.num_replays = self.num_eager = 0

    def _make_pools(self, device: torch.device | str) -> Pools:
        sizes = (self.layout, self.model.states, self.num_blocks, self.block_size)
        return DevicePools(*sizes, device, self.num_slots)

    # -- capturing -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, buckets: Buckets) -> None:
        """Capture graphs for every shape of ``buckets``, largest first, and use the graphs from now on.

        Without sampling filters a decode saves launches; a chunk takes long, so a single graph serves both.
        """
        self._graphs = {}
        for shape in buckets.shapes():
            for filtered in (False, True) if shape.is_decode else (True,):
                self._capture_both(shape, filtered)
        self.buckets = buckets

    @torch.inference_mode()
    def measure(self, shape: StepShape, repeats: int = 5) -> float:
        """Seconds of a captured step of ``shape``, every sequence at full length."""
        captured, _ = self._capture(shape, filtered=False)
        packed = np.zeros(captured.layout.num_bytes, dtype=np.uint8)
        captured.layout.pack(full_step(shape, self.block_size, self.max_model_len), packed)
        captured.inputs.copy_(torch.from_numpy(packed))
        return self.gpu.seconds(captured.replay, repeats)

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the largest step eagerly, without writing KV. The runtime must spare the allocated memory."""
        layout = Layout(self.largest, self.largest.sequences, self.further)
        packed = np.zeros(layout.num_bytes, dtype=np.uint8)
        layout.pack(full_step(self.largest, self.block_size, self.max_model_len), packed)
        self._eager_inputs[: layout.num_bytes].copy_(torch.from_numpy(packed))
        self._compute(layout.views(self._eager_inputs), filtered=True)

    def _capture_both(self, shape: StepShape, filtered: bool) -> None:
        """Capture the graph of ``shape``, and one for whole prompts if a kernel treats them differently."""
        alone = shape.sequences == 1 < shape.tokens
        captured, differs = self._capture(shape, filtered, whole=alone)
        self._graphs[shape, filtered, True] = captured
        self._graphs[shape, filtered, False] = self._capture(shape, filtered)[0] if differs else captured

    def _capture(self, shape: StepShape, filtered: bool, whole: bool = False) -> tuple[CapturedStep, bool]:
        """A graph, and True for a graph of whole prompts only."""
        layout = Layout(shape, shape.sequences, self.further)
        inputs = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        empty = np.zeros(layout.num_bytes, dtype=np.uint8)
        layout.pack(nothing(), empty)  # the warm-up must not write KV
        inputs.copy_(torch.from_numpy(empty))
        views = layout.views(inputs)
        self.num_captures += 1
        prompt = WholePrompt() if whole else None
        replay = self.gpu.capture(lambda: self._compute(views, filtered, prompt))
        return CapturedStep(layout, inputs, replay), prompt is not None and prompt.used

    # -- running ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Logits [sum of num_logits, vocab_size] float32 on the device."""
        if any(
            item.sinks for item in batch.items
        ):  # apart: buckets and buffers have room for ``batch`` alone
            self._run(Batch(tuple(sinks_of(item) for item in batch.items if item.sinks)), ())
            batch = Batch(tuple(replace(item, sinks=()) for item in batch.items))
        logits, count = self._run(batch, ())
        return logits[:count].clone()  # the next replay of a graph writes to the same place

    @torch.inference_mode()
    def launch(self, batch: Batch) -> QueuedStep:
        due = [item for item in batch.items if item.needs_logits]
        self._run(batch, due)
        self._rows = {id(item.request): row for row, item in enumerate(due)}
        results = next(self._results)[: len(due)]
        results.copy_(self._sampled[: len(due)], non_blocking=True)
        return QueuedStep(self.gpu.mark(), results)

    @torch.inference_mode()
    def prepared(self, batch: Batch) -> Callable[[], None]:
        """The replay of the graph for ``batch``, inputs in place, for timing the device alone.

        Raises:
            LookupError: no graph fits.
        """
        before = self.num_replays
        self._run(batch, [item for item in batch.items if item.needs_logits])
        if self.num_replays == before:
            raise LookupError(f"no graph for {batch.num_tokens} tokens of {len(batch.items)} sequences")
        return self._last.replay

    def counters(self) -> dict[str, int]:
        return {
            "graph_captures": self.num_captures,
            "graph_replays": self.num_replays,
            "eager_steps": self.num_eager,
            "kernel_compilations": self.gpu.num_compilations(),
        }

    def _run(self, batch: Batch, due: Sequence[ScheduledRequest]) -> tuple[Tensor, int]:
        """Queue a step; returns the logits, and the number of valid rows."""
        arrays = self.batch_inputs(batch)
        arrays["input_ids"], arrays["source"] = self._sources(batch, arrays)
        arrays[STATE_SLOTS] = state_slots(batch, self.num_slots) if self.num_slots else np.zeros(0)
        count = len(arrays["logits_index"])
        if count == 0:
            arrays["logits_index"] = np.array([batch.num_tokens - 1], dtype=np.int64)
        arrays |= sampling_inputs(due)
        tokens, (sequences, blocks) = batch.num_tokens, arrays["block_tables"].shape
        whole = sequences == 1 and int(arrays["seq_lens"][0]) == tokens
        shape = self.buckets.fit(tokens, sequences, len(arrays["logits_index"]))
        if shape is None:
            self.num_eager += 1
            shape = StepShape(tokens, sequences, blocks)
            layout = Layout(shape, len(arrays["logits_index"]), self.further)
            self._send(layout, arrays, self._eager_inputs)
            prompt = WholePrompt() if whole else None
            return self._compute(layout.views(self._eager_inputs), has_filters(due), prompt), count
        self.num_replays += 1
        graph = self._last = self._graphs[shape, has_filters(due) or not shape.is_decode, whole]
        self._send(graph.layout, arrays, graph.inputs)
        graph.replay()
        return graph.replay.output, count

    def _send(self, layout: Layout, arrays: Mapping[str, np.ndarray], inputs: Tensor) -> None:
        staging = next(self._staging)
        host = staging.writable(layout.num_bytes)
        layout.pack(arrays, host.numpy())
        inputs[: layout.num_bytes].copy_(host, non_blocking=True)
        staging.copied = self.gpu.mark()

    def _compute(
        self, views: Mapping[str, Tensor], filtered: bool, prompt: WholePrompt | None = None
    ) -> Tensor:
        """Run a step from inputs on the device; sampled tokens go to ``_sampled``."""
        source = views["source"]
        known = views["input_ids"]
        before = self._sampled[source.clamp_min(0)].clamp_min(0)  # a failed row gives a token like any other
        names = (*BATCH_INPUTS, STATE_SLOTS, *self.layout.further_inputs)
        inputs = {name: views[name] for name in names}
        inputs["input_ids"] = torch.where(source >= 0, before, known)
        with whole_prompt(prompt):
            logits: Tensor = self._call_model(inputs | self.kv_pools | self.state_pools)
        tokens = self.sample(logits, *(views[name] for name in SAMPLING_INPUTS), filtered=filtered)
        self._sampled[: len(tokens)].copy_(tokens)
        return logits

    def _sources(self, batch: Batch, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Input ids [T] with 0 for pending tokens, and the rows of the last step with the pending tokens."""
        ids = arrays["input_ids"]
        source = np.full_like(ids, -1)
        pending = ids == PENDING
        if pending.any():
            last = arrays["query_start"][1:] - 1
            for place, item in zip(last.tolist(), batch.items, strict=True):
                if pending[place]:
                    source[place] = self._rows[id(item.request)]
        return np.where(pending, 0, ids), source


def nothing() -> dict[str, np.ndarray]:
    """The inputs of a step of no sequence: all padding."""
    arrays = {name: np.zeros(0) for name in (*BATCH_INPUTS, *SAMPLING_INPUTS, STATE_SLOTS, "source")}
    return arrays | {"query_start": np.zeros(1), "block_tables": np.zeros((0, 0))}


def full_step(shape: StepShape, block_size: int, max_model_len: int) -> dict[str, np.ndarray]:
    """The inputs of a step as large as ``shape``: tokens spread over sequences of full length.

    The step writes no KV and reads all KV from the pool's first block. Recurrent states go through the first slot.
    """
    ends = np.linspace(0, shape.tokens, shape.sequences + 1).astype(np.int64)
    counts = np.diff(ends)
    length = max(min(shape.blocks * block_size, max_model_len), int(counts.max()))
    rows = np.repeat(np.arange(shape.sequences), counts)
    positions = length - counts[rows] + np.arange(shape.tokens) - ends[:-1][rows]
    return nothing() | {
        "input_ids": np.arange(shape.tokens) % 7,
        "positions": np.minimum(positions, max_model_len - 1),
        "query_start": ends,
        "seq_lens": np.full(shape.sequences, length),
        "block_tables": np.zeros((shape.sequences, shape.blocks)),
        "logits_index": np.maximum(ends[1:] - 1, 0),
    }
