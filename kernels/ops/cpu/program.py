"""Programs: runs of native kernel calls in a single C call (program.cpp).

``Builder`` collects calls on *views* and ``build`` turns the calls into a ``Program``. A view is a matrix of the
flattened batch: a row a token (or a row a row of logits), a fixed shape per row. The memory of a view is a *buffer* of
the program, an input tensor, or an output tensor. Buffers live in a common arena. A buffer has a place **per row**, so
a plan holds for every batch size, and buffers without overlapping lives share a place. The arena grows to the largest
batch so far and stays; a step allocates only the outputs.

A *run* is a sequence of calls that compute each token from the same token of their inputs, such as all calls between
two attentions. A prompt goes through a run in blocks of tokens, one block a thread at a time (program.h). Buffers that
only one run uses are *local*: their memory is for one block.

The kernels, the order of the arguments and the types behind pointers are listed in ``signatures.h``.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from optkit.kernels.cpu import signatures
from optkit.kernels.cpu.call_list import (
    ALIGN,
    ARENA,
    ARGUMENT,
    BLOCK,
    CALL,
    CONSTANT,
    INPUT,
    LOGITS,
    SIZE,
    TOKENS,
    Blocks,
    CallList,
    CallPlan,
)
from optkit.kernels.cpu.signatures import Parameter

LONGEST_RUN = 16  # calls
NODES = "+"  # between the names of nodes in one call
DEFAULT_BLOCKS = Blocks()


def no_tensor() -> None:
    """A weak reference to no tensor."""


@dataclass(eq=False)
class Buffer:
    """Memory of ``row_bytes`` for each of the batch's ``rows`` (TOKENS or LOGITS)."""

    rows: int
    row_bytes: int
    place: int = -1  # bytes per row, from the start of the arena
    born: int = -1  # the call that writes it first
    dies: int = -1  # the call that uses it last
    output: int | None = None  # its number among the outputs, which are tensors of their own
    local: bool = False  # of a run


@dataclass(frozen=True)
class View:
    """Rows in a buffer, or in the input tensor of this number. Rows are dense, at any distance from each other."""

    memory: Buffer | int
    rows: int
    shape: tuple[int, ...]
    row_stride: int  # elements from row to row
    offset: int = 0  # elements from the start of the row
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        """Elements of a row."""
        return torch.Size(self.shape).numel()

    def reshape(self, shape: Sequence[int]) -> View:
        return replace(self, shape=tuple(shape))

    def split(self, sizes: Sequence[int]) -> tuple[View, ...]:
        """Parts of rows of one dimension."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(
            replace(self, shape=(size,), offset=self.offset + start)
            for size, start in zip(sizes, starts, strict=True)
        )


@dataclass(frozen=True)
class Size:
    """A size of the batch, multiplied by ``times``, as an argument."""

    index: int
    times: int = 1


Argument = View | Tensor | Size | int | float | None


class Builder:
    """Collects the calls of a program."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Argument]]] = []
        self.by_rows: list[bool] = []  # of each call
        self.blocks = DEFAULT_BLOCKS
        self.buffers: list[Buffer] = []
        self.outputs: list[View] = []
        self.num_inputs = 0
        self.expected: list[tuple[int, tuple[int, ...], torch.dtype] | None] = []
        self.node = ""  # of the graph, for which the next calls are made; several nodes are joined by NODES
        self.nodes: list[str] = []  # of each call

    def input(self, rows: int, shape: Sequence[int], dtype: torch.dtype, *, check: bool = True) -> View:
        """The next input tensor, [rows, *shape], contiguous; without ``check`` the caller guarantees the shape in
        every step.
        """
        self.num_inputs += 1
        self.expected.append((rows, tuple(shape), dtype) if check else None)
        return View(self.num_inputs - 1, rows, tuple(shape), torch.Size(shape).numel(), 0, dtype)

    def buffer(self, rows: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> View:
        """A new buffer with dense rows."""
        width = torch.Size(shape).numel()
        size = width * dtype.itemsize
        self.buffers.append(Buffer(rows, -(-size // ALIGN) * ALIGN))
        return View(self.buffers[-1], rows, tuple(shape), width, 0, dtype)

    def call(
        self, name: str, *, by_rows: bool = False, blocks: Blocks = DEFAULT_BLOCKS, **arguments: Argument
    ) -> None:
        """Add a call of kernel ``name``, each argument by the name of its parameter.

        Args:
            by_rows: the kernel computes each row from the same row of the inputs. So a run may take the call, if all
                rows are the batch's tokens.
            blocks: the sizes of blocks at which the kernel is fast; a program takes the largest of all calls.

        Raises:
            ValueError: no such kernel, or an argument is missing or too many.
            NotImplementedError: a pointer is of another type or layout than the kernel reads.
        """
        kernel = signatures.kernel(name)
        names = [parameter.name for parameter in kernel.parameters]
        if set(names) != set(arguments):
            raise ValueError(f"{name} takes {', '.join(names)}; given are {', '.join(arguments)}")
        for parameter in kernel.parameters:
            check_argument(name, parameter, arguments[parameter.name])
        for argument in arguments.values():
            if isinstance(argument, View) and isinstance(argument.memory, Buffer):
                buffer = argument.memory
                buffer.born = len(self.calls) if buffer.born < 0 else buffer.born
                buffer.dies = len(self.calls)
        self.calls.append((name, [arguments[each] for each in names]))
        self.by_rows.append(by_rows and is_of_tokens(arguments.values()))
        self.blocks = Blocks(max(self.blocks.least, blocks.least), max(self.blocks.most, blocks.most))
        self.nodes.append(self.node)

    def output(self, view: View) -> int:
        """Make the buffer of ``view``, which must fill the buffer, an output tensor; the number of the output."""
        buffer = view.memory
        if not isinstance(buffer, Buffer) or view.offset or view.row_stride != view.width:
            raise ValueError("only a whole buffer can be an output")
        if buffer.output is None:
            buffer.output = len(self.outputs)
            self.outputs.append(view)
        return buffer.output

    def build(self) -> Program:
        runs = runs_of(self.by_rows)
        run_of = {call: number for number, run in enumerate(runs) for call in run}
        kept = [b for b in self.buffers if b.output is None and b.born >= 0]
        for buffer in kept:
            first, last = run_of[buffer.born], run_of[buffer.dies]
            buffer.local = buffer.rows == TOKENS and first == last and len(runs[first]) > 1
            if not buffer.local:
                # Blocks of a run are not in step: what the run uses lives as long as the run.
                buffer.born, buffer.dies = runs[first].start, runs[last].stop - 1
        groups = [[b for b in kept if b.rows == rows and not b.local] for rows in (TOKENS, LOGITS)]
        return Program(self, runs, [place(group) for group in groups], place([b for b in kept if b.local]))


def check_argument(kernel: str, parameter: Parameter, argument: Argument) -> None:
    """Compare an argument with its parameter.

    Raises:
        NotImplementedError: native code would misread the argument.
    """
    dtypes = signatures.DTYPES.get(parameter.kind, ())
    match argument:
        case View():
            dense = argument.row_stride == argument.width
            fits = dtype_name(argument.dtype) in dtypes and (dense or parameter.strided)
        case Tensor():
            on_cpu = argument.device.type == "cpu" and argument.is_contiguous()
            fits = dtype_name(argument.dtype) in dtypes and on_cpu
        case Size() | int():
            fits = parameter.kind in ("int64_t", "int")
        case float():
            fits = parameter.kind == "float"
        case _:
            fits = argument is None and parameter.is_pointer
    if not fits:
        raise NotImplementedError(f"{kernel} can't read {argument!r:.80} as {parameter.name}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in numpy and torch, such as float32."""
    return str(dtype).removeprefix("torch.")


def place(buffers: Sequence[Buffer]) -> int:
    """Give every buffer its place in an arena for buffers of these rows; the arena's bytes per row.

    First fit, largest first: good enough, since a transformer's layers all need the same few buffers.
    """
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.row_bytes):
        alive = [b for b in placed if b.born <= buffer.dies and buffer.born <= b.dies]
        at = 0
        for other in sorted(alive, key=lambda b: b.place):
            if at + buffer.row_bytes <= other.place:
                break
            at = max(at, other.place + other.row_bytes)
        buffer.place = at
        placed.append(buffer)
    return max((b.place + b.row_bytes for b in placed), default=0)


def runs_of(by_rows: Sequence[bool]) -> list[range]:
    """All calls as runs of at most ``LONGEST_RUN`` calls by rows, and other calls alone."""
    runs: list[range] = []
    for call, can_join in enumerate(by_rows):
        if runs and can_join and by_rows[call - 1] and len(runs[-1]) < LONGEST_RUN:
            runs[-1] = range(runs[-1].start, call + 1)
        else:
            runs.append(range(call, call + 1))
    return runs


def is_of_tokens(arguments: Iterable[Argument]) -> bool:
    """True where all rows and sizes among ``arguments`` are those of the batch's tokens."""
    arguments = tuple(arguments)
    rows = {value.rows for value in arguments if isinstance(value, View)}
    sizes = {value.index for value in arguments if isinstance(value, Size)}
    return rows == sizes == {TOKENS}


def row_bytes(value: Argument) -> int:
    """Bytes from a row of the argument to the next one; 0 where the argument has no rows of the batch."""
    return value.row_stride * value.dtype.itemsize if isinstance(value, View) else 0


class Program:
    """A list of kernel calls on tensors; a call takes the tensors with the sizes of the batch, then the inputs.

    Attributes:
        calls: the list.
        constants: tensors with addresses in the calls.
        constant_at: the place among the arguments of each of ``constants``.
        checked: number, rows, shape and dtype of the inputs that torch computes.
        outputs: rows, shape of a row, and dtype of each output.
    """

    __name__, __module__ = "program", __name__  # torch.fx names nodes and generated code after their target

    def __init__(
        self, builder: Builder, runs: Sequence[range], bytes_per_row: Sequence[int], block_token_bytes: int
    ) -> None:
        self.num_inputs = builder.num_inputs
        self.checked = [(i, *known) for i, known in enumerate(builder.expected) if known is not None]
        self.outputs = [(view.rows, view.shape, view.dtype) for view in builder.outputs]
        self.constants: list[Tensor] = []
        self.constant_at: list[int] = []
        calls, arguments = bytearray(), bytearray()
        lengths = {run.start: len(run) for run in runs}
        for i, (name, values) in enumerate(builder.calls):
            op = cast(int, signatures.kernel(name).number)
            calls += CALL.pack(op, len(arguments) // ARGUMENT.size, lengths.get(i, 0), 0)
            for value in values:
                if isinstance(value, Tensor):
                    self.constants.append(value)
                    self.constant_at.append(len(arguments) // ARGUMENT.size)
                arguments += ARGUMENT.pack(*self._encode(value), row_bytes(value))
        plan = CallPlan(
            runs=tuple((run.start, run.stop) for run in runs),
            blocks=(builder.blocks.least, builder.blocks.most),
            bytes_per_row=tuple(bytes_per_row),
            block_token_bytes=block_token_bytes,
            num_inputs=self.num_inputs,
            num_outputs=len(self.outputs),
            weight_bytes=sum(tensor.nbytes for tensor in self.constants),
            made_for=tuple(
                (node, name) for node, (name, _) in zip(builder.nodes, builder.calls, strict=True)
            ),
        )
        self.calls = CallList(plan, bytes(calls), bytes(arguments))
        self._placed: list[Callable[[], Tensor | None]] = [no_tensor] * self.num_inputs

    @property
    def num_calls(self) -> int:
        return self.calls.num_calls

    @property
    def made_for(self) -> tuple[tuple[str, str], ...]:
        """The node of the graph and the kernel of each call."""
        return self.calls.plan.made_for

    def with_calls(self, calls: CallList) -> Program:
        """A program with the inputs and outputs of this one, and other calls."""
        made = copy(self)
        made.calls = calls
        return made

    def _encode(self, value: Argument) -> tuple[int, int, int, int]:
        """Source, index, value and offset of program.h."""
        match value:
            case View(memory=int(number)):
                return INPUT, number, 0, value.offset * value.dtype.itemsize
            case View(memory=Buffer(output=None) as buffer):
                source = BLOCK if buffer.local else ARENA
                return source, value.rows, buffer.place, value.offset * value.dtype.itemsize
            case View(memory=Buffer() as buffer):
                return INPUT, self.num_inputs + (buffer.output or 0), 0, value.offset * value.dtype.itemsize
            case Size(index, times):
                return SIZE, index, times, 0
            case Tensor():
                return CONSTANT, 0, value.data_ptr(), 0
            case float():
                return CONSTANT, 0, struct.unpack("=i", struct.pack("=f", value))[0], 0
            case int():
                return CONSTANT, 0, value, 0
            case _:
                return CONSTANT, 0, 0, 0

    def __call__(
        self,
        input_ids: Tensor,
        logits_index: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        k_cache: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run all calls; gives the outputs. ``k_cache`` is any KV pool, for the block size; None where there is none.

        Raises:
            IndexError: a token id or a row to select does not exist.
            ValueError: an input has another shape or type than the program was made for.
            StepCancelled: from the check of the step (``optkit.cancellation``).
        """
        block_size = 0 if k_cache is None else k_cache.shape[1]
        sizes = (len(input_ids), len(logits_index), len(seq_lens), block_tables.shape[1], block_size)
        self._check(inputs, sizes)
        copies = self._place_inputs(inputs)
        outputs = [torch.empty((sizes[rows], *shape), dtype=dtype) for rows, shape, dtype in self.outputs]
        self.calls.inputs[self.num_inputs :] = [t.data_ptr() for t in outputs]
        self.calls.run(sizes)
        del copies  # alive until here, since the calls read them
        return tuple(outputs)

    def _check(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Compare tensors computed by torch with the shapes and types of the plan, since the calls take addresses."""
        for index, rows, shape, dtype in self.checked:
            given = inputs[index]
            if given.shape != (sizes[rows], *shape) or given.dtype is not dtype:
                found, wanted = list(given.shape), [sizes[rows], *shape]
                raise ValueError(f"input {index} of a program is {given.dtype} {found}, not {dtype} {wanted}")

    def _place_inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Take the addresses of ``inputs``; gives the dense copies of inputs that are not dense.

        KV pools, nearly all of the inputs, are the same tensors in every step, and keep the address of the step before.
        """
        copies = []
        for index, (tensor, placed) in enumerate(zip(inputs, self._placed, strict=True)):
            if placed() is tensor:
                continue
            if tensor.is_contiguous():
                self._placed[index] = weakref.ref(tensor)
            else:
                self._placed[index] = no_tensor
                copies.append(tensor := tensor.contiguous())
            self.calls.inputs[index] = tensor.data_ptr()
        return copies
