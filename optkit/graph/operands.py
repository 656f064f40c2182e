"""The operands of every dialect op: where each comes from, its dtype and its shape. One row an op.

Native kernels take addresses, so what they read is checked before anything runs (``operand_check``). A shape is a list
of symbols: equal symbols of one op are equal sizes, a number is that size, ``S+1`` is one more than S, and ``...`` is
any number of leading sizes, the same wherever it stands in the row. Relations between sizes (a divisor, packed words)
are in ``shape_rules``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from optkit.graph.ir import KV_DTYPES
from optkit.kernels.packed_codes import BITS
from optkit.kernels.reference import FORMATS

MAX_FLOAT32 = 3.4e38
MAX_INT = 2**31 - 1
HALVES = (torch.bfloat16, torch.float16)


class Source(Enum):
    """Where the tensor of an operand comes from."""

    VALUE = "a computed value"  # or a batch input, never a weight
    WEIGHT = "a weight"
    ANY = "a weight or a computed value"
    BATCH = "the batch input of its name"  # itself: kernels take its values for addresses
    POOL = "a KV pool of the graph's inputs"


class Kind(Enum):
    """The dtypes of an operand: their name in messages, the dtypes, whether a GPU also takes its compute dtype."""

    COMPUTE = ("float32", (torch.float32,), True)
    FLOAT32 = ("float32", (torch.float32,), False)
    FLOAT = ("float32, float16 or bfloat16", (torch.float32, *HALVES), False)
    FP8 = ("float8_e4m3fn", (torch.float8_e4m3fn,), False)
    INT64 = ("int64", (torch.int64,), False)
    INT32 = ("int32", (torch.int32,), False)
    INT8 = ("int8", (torch.int8,), False)
    UINT8 = ("uint8", (torch.uint8,), False)
    KV = ("a KV dtype", tuple(dtype for dtype, _ in KV_DTYPES.values()), False)

    def accepts(self, dtype: torch.dtype, *, half: bool) -> bool:
        """Whether ``dtype`` is one of these; with ``half`` bfloat16 and float16 are compute dtypes."""
        _, dtypes, computes = self.value
        return dtype in dtypes or (half and computes and dtype in HALVES)

    @property
    def label(self) -> str:
        return self.value[0]


@dataclass(frozen=True)
class TensorOperand:
    """A tensor that an op takes; ``optional`` ones may be None or left out at the end."""

    name: str
    source: Source
    kind: Kind
    shape: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class Number:
    """A finite number from ``low`` to ``high``; with ``whole`` an int. Without ``required`` it has a default."""

    name: str
    low: float = -MAX_FLOAT32
    high: float = MAX_FLOAT32
    whole: bool = False
    required: bool = False


@dataclass(frozen=True)
class Choice:
    """One of some values, of exactly their type. Without ``stored`` only lowering sets it, and graph.json must not."""

    name: str
    values: tuple[str | int, ...]
    stored: bool = True


Operand = TensorOperand | Number | Choice


def value(name: str, kind: Kind, shape: str) -> TensorOperand:
    return TensorOperand(name, Source.VALUE, kind, tuple(shape.split()))


def weight(name: str, kind: Kind, shape: str) -> TensorOperand:
    return TensorOperand(name, Source.WEIGHT, kind, tuple(shape.split()))


def either(name: str, kind: Kind, shape: str) -> TensorOperand:
    return TensorOperand(name, Source.ANY, kind, tuple(shape.split()))


def batch(name: str, kind: Kind, shape: str) -> TensorOperand:
    return TensorOperand(name, Source.BATCH, kind, tuple(shape.split()))


def pool(name: str) -> TensorOperand:
    return TensorOperand(name, Source.POOL, Kind.KV, ("blocks", "block_size", "J", f"row_of_{name}"))


def optional(operand: TensorOperand) -> TensorOperand:
    return replace(operand, optional=True)


def whole(name: str, low: int, high: int, *, required: bool = False) -> Number:
    return Number(name, low, high, whole=True, required=required)


X = value("x", Kind.COMPUTE, "... K")
ROWS_X = value("x", Kind.COMPUTE, "T K")
RESIDUAL = value("residual", Kind.COMPUTE, "... K")
NORM_WEIGHT = optional(either("weight", Kind.COMPUTE, "K"))
EPS, OFFSET = Number("eps", 0.0, required=True), Number("offset")
ANY_BIAS = optional(either("bias", Kind.COMPUTE, "N"))
BIAS = optional(weight("bias", Kind.COMPUTE, "N"))
INT8_ROWS, INT8_SCALE = value("q", Kind.UINT8, "T K"), value("scale", Kind.FLOAT32, "T G")
INT8_WEIGHT, GROUP_SCALE = weight("weight", Kind.INT8, "N K"), weight("weight_scale", Kind.FLOAT, "N G")
FP8_WEIGHT = weight("weight", Kind.FP8, "N K")
GATE, UP = value("gate", Kind.COMPUTE, "..."), value("up", Kind.COMPUTE, "...")
GATE_UP = value("gate_up", Kind.COMPUTE, "... F")
ROWS_GATE_UP = value("gate_up", Kind.COMPUTE, "T F")
GELU = Choice("approximate", ("none", "tanh"))
FMT, RESULT = Choice("fmt", FORMATS), Choice("dtype", ("float32", "bfloat16", "float16"), stored=False)
Q, K, V = (
    value(*of)
    for of in (("q", Kind.COMPUTE, "T H D"), ("k", Kind.COMPUTE, "T J D"), ("v", Kind.COMPUTE, "T J E"))
)
ANGLES = (value("cos", Kind.COMPUTE, "T R"), value("sin", Kind.COMPUTE, "T R"))
POOLS = (pool("k_cache"), pool("v_cache"))
SLOTS = batch("slot_mapping", Kind.INT64, "T")
SEQUENCES = (
    batch("query_start", Kind.INT32, "S+1"),
    batch("seq_lens", Kind.INT32, "S"),
    batch("block_tables", Kind.INT32, "S B"),
)
SCORES = (Number("scale", required=True), whole("window", 0, MAX_INT), Number("softcap", 0.0))

OPERANDS: dict[str, tuple[Operand, ...]] = {
    "embedding": (either("weight", Kind.COMPUTE, "V K"), value("ids", Kind.INT64, "T")),
    "linear": (either("x", Kind.COMPUTE, "... K"), either("weight", Kind.COMPUTE, "N K"), ANY_BIAS),
    "rms_norm": (X, NORM_WEIGHT, EPS, OFFSET),
    "add_rms_norm": (X, RESIDUAL, NORM_WEIGHT, EPS, OFFSET),
    "layer_norm": (X, NORM_WEIGHT, optional(either("bias", Kind.COMPUTE, "K")), EPS),
    "rope_table": (
        value("positions", Kind.INT64, "T"),
        either("inv_freq", Kind.FLOAT32, "R"),
        Number("scale"),
    ),
    "rope": (value("x", Kind.COMPUTE, "T H R"), *ANGLES),
    "silu_mul": (GATE, UP),
    "gelu_mul": (GATE, UP, GELU),
    "silu_mul_packed": (GATE_UP,),
    "gelu_mul_packed": (GATE_UP, GELU),
    "select_rows": (value("x", Kind.COMPUTE, "T ..."), batch("index", Kind.INT64, "L")),
    "by_tokens": (
        value("few", Kind.COMPUTE, "..."),
        value("many", Kind.COMPUTE, "..."),
        batch("positions", Kind.INT64, "T"),
        whole("limit", 1, MAX_INT, required=True),
    ),
    "grouped_mm": (
        value("x", Kind.COMPUTE, "M K"),
        either("weight", Kind.COMPUTE, "E K N"),
        value("offsets", Kind.INT32, "E"),
    ),
    "quantize_per_token": (ROWS_X, whole("group_size", 0, MAX_INT)),
    "quantize_fp8_per_token": (ROWS_X,),
    "rms_norm_quantize": (ROWS_X, NORM_WEIGHT, EPS, OFFSET, FMT),
    "add_rms_norm_quantize": (
        ROWS_X,
        value("residual", Kind.COMPUTE, "T K"),
        NORM_WEIGHT,
        EPS,
        OFFSET,
        FMT,
    ),
    "silu_mul_quantize": (ROWS_GATE_UP, FMT),
    "gelu_mul_quantize": (ROWS_GATE_UP, FMT, GELU),
    "linear_w8a8": (INT8_ROWS, INT8_SCALE, INT8_WEIGHT, GROUP_SCALE, BIAS, RESULT),
    "linear_w4a8": (
        INT8_ROWS,
        value("scale", Kind.FLOAT32, "T A"),
        weight("weight", Kind.INT32, "N W"),
        GROUP_SCALE,
        optional(weight("weight_minimum", Kind.FLOAT, "N G")),
        BIAS,
    ),
    "linear_w8a16": (ROWS_X, INT8_WEIGHT, GROUP_SCALE, BIAS),
    "linear_wna16": (
        ROWS_X,
        weight("weight", Kind.INT32, "N W"),
        GROUP_SCALE,
        optional(weight("weight_zero", Kind.UINT8, "N G")),
        optional(weight("g_idx", Kind.INT32, "K")),
        BIAS,
        Choice("bits", BITS),
        whole("group_size", 0, MAX_INT),
    ),
    "linear_fp8": (
        X,
        FP8_WEIGHT,
        weight("weight_scale", Kind.FLOAT32, "N G"),
        optional(weight("input_scale", Kind.FLOAT32, "1")),
        BIAS,
        Choice("activations", ("token", "tensor", "none")),
    ),
    "linear_fp8_rowwise": (
        value("q", Kind.FP8, "T K"),
        value("scale", Kind.FLOAT32, "T 1"),
        FP8_WEIGHT,
        weight("weight_scale", Kind.FLOAT32, "N 1"),
        BIAS,
        RESULT,
    ),
    "attention": (Q, K, V, *POOLS, SLOTS, *SEQUENCES, *SCORES),
    "rope_kv_write": (Q, K, V, *ANGLES, *POOLS, SLOTS),
    "paged_attention": (Q, K, V, *POOLS, *SEQUENCES, *SCORES),
}
# Batch inputs whose operand has another name.
BATCH_NAMES = {("select_rows", "index"): "logits_index"}
