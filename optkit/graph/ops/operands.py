"""Operands: the arguments of an op as the op's record describes them, with role, source, dtype and shape.

Native kernels take addresses, so operands are checked before anything runs (``optkit.graph.operand_check``). A shape
is a list of symbols: equal symbols of an op are equal sizes, a number is a fixed size, ``S+1`` is 1 more than S, and
``...`` is any number of leading sizes, the same in all operands of the op. Relations between sizes (a divisor, packed
words) are part of the op's shape rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from optkit.graph.states import KV_DTYPES, STATE_DTYPES, torch_dtype

MAX_FLOAT32 = 3.4e38
MAX_INT = 2**31 - 1
HALVES = (torch.bfloat16, torch.float16)


class Role(Enum):
    """The part of a tensor in an op; ``Op`` finds arguments by role."""

    ACTIVATION = "a value of the step that the op transforms"
    ACTIVATION_SCALE = "scales of quantized activations"
    WEIGHT = "the weight"
    WEIGHT_SCALE = "scales of a quantized weight"
    ZERO = "zero points or minimums of a quantized weight"
    CHANNELS = "a tensor of the input channels, shared by layers that read one activation"
    BIAS = "the bias"
    CACHE = "a KV pool"
    STATE = "a pool of recurrent states"
    BATCH = "an input that describes the batch"
    TABLE = "rotary angles, frequencies, experts of tokens, or numbers of the heads"


class Source(Enum):
    """The origin of an operand's tensor in the graph."""

    VALUE = "a computed value"  # or a batch input, never a weight
    WEIGHT = "a weight"
    ANY = "a weight or a computed value"
    BATCH = "the batch input of its name"  # itself: kernels take its values for addresses
    POOL = "a pool of the graph's inputs"


class Kind(Enum):
    """The dtypes of an operand: the name in messages, the dtypes, True where a GPU also takes the compute dtype."""

    COMPUTE = ("float32", (torch.float32,), True)
    FLOAT32 = ("float32", (torch.float32,), False)
    FLOAT = ("float32, float16 or bfloat16", (torch.float32, *HALVES), False)
    FP8 = ("float8_e4m3fn", (torch.float8_e4m3fn,), False)
    INT64 = ("int64", (torch.int64,), False)
    INT32 = ("int32", (torch.int32,), False)
    INT8 = ("int8", (torch.int8,), False)
    UINT8 = ("uint8", (torch.uint8,), False)
    KV = ("a KV dtype", tuple(torch_dtype(dtype) for dtype, _ in KV_DTYPES.values()), False)
    SUMS = ("float32 or int32", (torch.float32, torch.int32), True)
    COLUMNS = ("float32, uint8 or float8_e4m3fn", (torch.float32, torch.uint8, torch.float8_e4m3fn), True)
    STATE = ("float32, bfloat16 or float16", tuple(map(torch_dtype, STATE_DTYPES)), False)

    def accepts(self, dtype: torch.dtype, *, half: bool) -> bool:
        """True for a ``dtype`` of the kind; with ``half`` bfloat16 and float16 are compute dtypes."""
        _, dtypes, computes = self.value
        return dtype in dtypes or (half and computes and dtype in HALVES)

    @property
    def label(self) -> str:
        return self.value[0]


@dataclass(frozen=True)
class TensorOperand:
    """A tensor argument of an op; an ``optional`` operand may be None, or left out at the end.

    Attributes:
        stored: the name of the tensor in a checkpoint's module, for operands of quantized layers.
    """

    name: str
    role: Role
    source: Source
    kind: Kind
    shape: tuple[str, ...]
    optional: bool = False
    stored: str = ""


@dataclass(frozen=True)
class Number:
    """A finite number from ``low`` to ``high``; with ``whole`` an int.

    A number without ``required`` has a default.
    """

    name: str
    low: float = -MAX_FLOAT32
    high: float = MAX_FLOAT32
    whole: bool = False
    required: bool = False


@dataclass(frozen=True)
class Choice:
    """A value out of ``values``, of exactly the same type.

    Without ``stored`` only lowering may set the operand; graph.json must not.
    """

    name: str
    values: tuple[str | int, ...]
    stored: bool = True


Operand = TensorOperand | Number | Choice


def value(name: str, kind: Kind, shape: str, role: Role = Role.ACTIVATION) -> TensorOperand:
    """An operand computed in the step."""
    return TensorOperand(name, role, Source.VALUE, kind, tuple(shape.split()))


def weight(name: str, kind: Kind, shape: str, role: Role = Role.WEIGHT, stored: str = "") -> TensorOperand:
    """An operand from the graph's weights, stored in checkpoints as ``stored``, by default as ``name``."""
    return TensorOperand(name, role, Source.WEIGHT, kind, tuple(shape.split()), stored=stored or name)


def either(name: str, kind: Kind, shape: str, role: Role = Role.WEIGHT) -> TensorOperand:
    """An operand from the graph's weights or computed in the step."""
    return TensorOperand(name, role, Source.ANY, kind, tuple(shape.split()))


def batch(name: str, kind: Kind, shape: str) -> TensorOperand:
    """A batch input of the graph."""
    return TensorOperand(name, Role.BATCH, Source.BATCH, kind, tuple(shape.split()))


def pool(name: str) -> TensorOperand:
    """A KV pool of the graph's inputs."""
    shape = ("blocks", "block_size", "J", f"row_of_{name}")
    return TensorOperand(name, Role.CACHE, Source.POOL, Kind.KV, shape)


def state(name: str, shape: str, kind: Kind = Kind.STATE) -> TensorOperand:
    """A pool of recurrent states [slots, *shape] of the graph's inputs, whose name begins with ``name``."""
    return TensorOperand(name, Role.STATE, Source.POOL, kind, ("slots", *shape.split()))


def optional(operand: TensorOperand) -> TensorOperand:
    return replace(operand, optional=True)


def whole(name: str, low: int, high: int, *, required: bool = False) -> Number:
    """An int from ``low`` to ``high``."""
    return Number(name, low, high, whole=True, required=required)


def expect(condition: bool, message: str) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: ``condition`` is false.
    """
    if not condition:
        raise ValueError(message)


EPS, OFFSET = Number("eps", 0.0, required=True), Number("offset")
X, ROWS_X = value("x", Kind.COMPUTE, "... K"), value("x", Kind.COMPUTE, "T K")
BIAS = optional(weight("bias", Kind.COMPUTE, "N", Role.BIAS))
RESULT = Choice("dtype", ("float32", "bfloat16", "float16"), stored=False)
