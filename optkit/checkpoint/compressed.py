"""The layouts of compressed-tensors checkpoints, read without the library compressed-tensors.

``pack-quantized``: ``weight_packed`` int32 [N, K * bits / 32] (dense codes, unsigned: ``code = value + 2^(bits -
1)``), ``weight_scale`` [N, G], ``weight_zero_point`` int32 [N * bits / 32, G] packed along N if asymmetric,
``weight_g_idx`` int32 [K] with act-order, ``weight_shape``. ``int-quantized`` and ``float-quantized`` (also under the
old name ``naive-quantized``): ``weight`` int8 or float8_e4m3 [N, K] and ``weight_scale`` of a channel ([N, 1]), a
tensor ([1]), groups ([N, G]) or, float8, blocks. An int8 embedding [V, K] is stored alike; a head tied to the embedding
has only a copy of the scales.

``quantization_config`` gives ``config_groups``, each a scheme and ``targets``: module names, ``re:`` patterns or class
names, the first match in this order. Tensors show the quantized layers; the scheme adds the bits and the treatment of
activations. Dynamic activation scales follow optkit's own rule, absmax / 127 of a token; compressed-tensors divides by
127.5. Patterns come from the checkpoint, so only simple patterns run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import (
    G_IDX,
    INPUT_SCALE,
    PACKED,
    SCALE,
    ZERO_POINT,
    LazyOperands,
    QuantizedLinear,
)
from optkit.checkpoint.reading import (
    FLOATS,
    GROUP_SIZES,
    Checked,
    checked_g_idx,
    checked_scale,
    setting,
    wna16,
)
from optkit.errors import UserError
from optkit.kernels import reference
from optkit.kernels.packed_codes import BITS, unpack_codes, words_of

NAME = "compressed-tensors"
PACK, INTS, FLOAT8, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
FORMATS = (PACK, INTS, FLOAT8, NAIVE)
MAX_GROUPS, MAX_TARGETS = 1024, 100_000
SIMPLE_PATTERN = re.compile(r"(?:[\w.\-^$|()\\]|\[[\w\-]{1,40}\]|\.\*|\.\+)+", re.ASCII)
MAX_WILDCARDS, MAX_PATTERN_CHARS, MAX_NAME_CHARS = 3, 400, 128


@dataclass(frozen=True)
class Scheme:
    """A scheme of ``config_groups``; ``activations``: None (float), ``"token"`` (dynamic) or ``"tensor"`` (static)."""

    targets: tuple[str, ...]
    bits: int
    floating: bool
    symmetric: bool
    group_size: int
    activations: str | None
    block: tuple[int, int] | None = None


def layers(config: Mapping[str, Any], source: Checked) -> list[QuantizedLinear]:
    """The quantized layers of a checkpoint with ``quantization_config`` ``config``.

    Raises:
        UserError: settings or tensors outside of the formats, or not run by optkit.
    """
    where = str(source.directory / "config.json")
    refuse_extensions(config, where)
    schemes = read_schemes(config, where)
    found: list[QuantizedLinear] = []
    packed = set(source.modules(PACKED))
    scaled = set(source.modules(SCALE))
    bare = {name for name in scaled - packed if f"{name}.weight" not in source.tensors}
    for name in sorted((packed | scaled) - bare):
        scheme = scheme_of(name, schemes, where)
        found.append((packed_layer if name in packed else plain_layer)(name, scheme, source))
    for name in sorted(bare):
        found = with_tied(found, name, source)
    return found


def is_float(config: Mapping[str, Any], where: str) -> bool:
    """True for a ``quantization_config`` that describes zeros in float weights, and no quantized layer."""
    if config.get("config_groups") or not config.get("sparsity_config"):
        return False
    refuse_extensions({**config, "quantization_status": "compressed"}, where)
    return True


def with_tied(found: list[QuantizedLinear], name: str, source: Checked) -> list[QuantizedLinear]:
    """``found``, with the scales of module ``name``, a head tied to an int8 embedding, among the embedding's tensors.

    The head has scales and no weight. The embedding is the layer with the same scales.

    Raises:
        UserError: no layer has the same scales.
    """
    stored = f"{name}.{SCALE}"
    scale = source.values[stored]
    for index, layer in enumerate(found):
        other = f"{layer.name}.{SCALE}"
        alike = layer.op is reference.linear_w8a16 and source.tensors[other].shape == scale.shape
        if alike and torch.equal(source.values[other], scale):
            found[index] = replace(layer, stored=(*layer.stored, stored))
            return found
    what = f"the tensor {name}.weight is missing, and no int8 embedding has the scales of {stored}"
    raise UserError(what, where=str(source.directory))


def refuse_extensions(config: Mapping[str, Any], where: str) -> None:
    """Refuse what changes the mathematics around the layers."""
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UserError(f"the weights are {status!r:.40}, not compressed", where=where)
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise UserError("sparse weights are not read", where=where, fix="use a dense checkpoint")
    if config.get("transform_config"):
        raise UserError("transforms (Hadamard rotations) of activations are not read", where=where)


# -- schemes ---------------------------------------------------------------------------------------------


def read_schemes(config: Mapping[str, Any], where: str) -> list[Scheme]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= MAX_GROUPS:
        raise UserError("'config_groups' in quantization_config must be a table of groups", where=where)
    overall = config.get("format")
    return [read_scheme(group, overall, where) for group in groups.values()]


def read_scheme(group: Any, overall: Any, where: str) -> Scheme:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise UserError("a group in quantization_config has no 'weights'", where=where)
    targets = group.get("targets")
    if (
        not isinstance(targets, list)
        or len(targets) > MAX_TARGETS
        or not all(isinstance(t, str) for t in targets)
    ):
        raise UserError("'targets' in quantization_config must be a list of names", where=where)
    own = group.get("format")
    setting(
        {"format": overall if own is None and overall != "mixed-precision" else own},
        "format",
        FORMATS,
        None,
        where,
    )
    if group.get("output_activations"):
        raise UserError("quantized output activations are not read", where=where)
    weights = group["weights"]
    floating = setting(weights, "type", ("int", "float"), "int", where) == "float"
    symmetric = setting(weights, "symmetric", (True, False), True, where)
    bits = setting(weights, "num_bits", (8,) if floating else BITS, 8, where)
    strategy = setting(weights, "strategy", ("channel", "group", "tensor", "block"), "tensor", where)
    group_size = setting(weights, "group_size", GROUP_SIZES, 0, where) if strategy == "group" else 0
    if floating and not symmetric:
        raise UserError("float8 weights with zero points are not read", where=where)
    return Scheme(
        tuple(targets),
        bits,
        floating,
        symmetric,
        max(group_size, 0),
        read_activations(group.get("input_activations"), floating, where),
        read_block(weights, where) if strategy == "block" else None,
    )


def read_activations(activations: Any, floating: bool, where: str) -> str | None:
    if activations is None:
        return None
    if not isinstance(activations, dict):
        raise UserError("'input_activations' in quantization_config must be a table", where=where)
    setting(activations, "num_bits", (8,), 8, where)
    setting(activations, "type", ("float",) if floating else ("int",), "int", where)
    setting(activations, "symmetric", (True,), True, where)
    if setting(activations, "dynamic", (True, False), False, where):
        setting(activations, "strategy", ("token", "group"), "token", where)
        return "token"
    if not floating:
        raise UserError(
            "static int8 activation scales are not run, only dynamic ones",
            where=where,
            fix="use a checkpoint whose input_activations are dynamic, or optimize the float model with int8",
        )
    setting(activations, "strategy", ("tensor",), "tensor", where)
    return "tensor"


def read_block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    block = weights.get("block_structure")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(b) is int and 0 < b <= 65536 for b in block)
    ):
        raise UserError("'block_structure' in quantization_config must be two sizes", where=where)
    return block[0], block[1]


def scheme_of(name: str, schemes: list[Scheme], where: str) -> Scheme:
    """The scheme of module ``name``: by name, by a pattern, or by a class, which all quantized layers fit."""
    tests: list[Callable[[str], bool]] = [
        lambda target: target == name,
        lambda target: target.startswith("re:") and simple_match(target[3:], name, where),
        lambda target: not target.startswith("re:") and "." not in target,
    ]
    for fits in tests:
        for scheme in schemes:
            if any(fits(target) for target in scheme.targets):
                return scheme
    raise UserError(f"{name} is quantized and no group in quantization_config is for it", where=where)


def simple_match(pattern: str, name: str, where: str) -> bool:
    """``re.match``, of patterns whose matching can't take long."""
    simple = len(pattern) <= MAX_PATTERN_CHARS and SIMPLE_PATTERN.fullmatch(pattern)
    if not simple or len(name) > MAX_NAME_CHARS or pattern.count(".*") + pattern.count(".+") > MAX_WILDCARDS:
        raise UserError(f"the target {pattern!r:.60} is no simple pattern", where=where)
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise UserError(f"the target {pattern!r:.60} is no regular expression", where=where) from error


# -- layers ----------------------------------------------------------------------------------------------


def packed_layer(name: str, scheme: Scheme, source: Checked) -> QuantizedLinear:
    """A ``pack-quantized`` layer."""
    where, bits = str(source.directory), scheme.bits
    n, _ = source.info(f"{name}.{PACKED}", ("I32",), (None, None)).shape
    source.info(f"{name}.weight_shape", ("I64", "I32"), (2,))
    rows, k = source.values[f"{name}.weight_shape"].tolist()
    if scheme.floating or rows != n or not 0 < k <= 1 << 24:
        raise UserError(f"{name}.weight_shape is [{rows}, {k}] for {n} rows of packed integers", where=where)
    source.info(f"{name}.{PACKED}", ("I32",), (n, words_of(k, bits)))
    groups = -(-k // (scheme.group_size or k))
    source.info(f"{name}.{SCALE}", FLOATS, (n, groups))
    stored = [f"{name}.{PACKED}", f"{name}.{SCALE}", f"{name}.weight_shape"]
    zero, g_idx = None, None
    if not scheme.symmetric:
        stored.append(f"{name}.{ZERO_POINT}")
        source.info(stored[-1], ("I32",), (words_of(n, bits), groups))
        zero = unpack_codes(source.values[stored[-1]].T, bits, n).T.contiguous()
    if f"{name}.{G_IDX}" in source.tensors:
        stored.append(f"{name}.{G_IDX}")
        source.info(stored[-1], ("I32", "I64"), (k,))
        value = source.values[stored[-1]]
        g_idx = None if bool((value == -1).all()) else checked_g_idx(value, groups, stored[-1], where)

    def read(key: str) -> Tensor:
        value = source.values[f"{name}.{key}"]
        return checked_scale(value, f"{name}.{key}", where) if key == SCALE else value

    if scheme.activations:
        return w4a8_layer(name, (n, k), scheme, zero is not None or g_idx is not None, read, stored, where)
    return wna16(name, (n, k), bits, scheme.group_size, zero, g_idx, read, stored)


def w4a8_layer(
    name: str,
    shape: tuple[int, int],
    scheme: Scheme,
    more: bool,
    read: Callable[[str], Tensor],
    stored: list[str],
    where: str,
) -> QuantizedLinear:
    group = scheme.group_size or shape[1]
    if more or scheme.bits != 4 or shape[1] % group or shape[1] % reference.INT4_PER_WORD:
        what = f"{name} has int8 activations, which optkit multiplies only by symmetric 4-bit weights in whole groups"
        raise UserError(what, where=where)
    operands = LazyOperands((PACKED, SCALE), read)
    return QuantizedLinear(
        name, shape, reference.linear_w4a8, operands, activation_group=0, stored=tuple(stored)
    )


def plain_layer(name: str, scheme: Scheme, source: Checked) -> QuantizedLinear:
    """An ``int-quantized`` or ``float-quantized`` layer."""
    where = str(source.directory)
    dtype = "F8_E4M3" if scheme.floating else "I8"
    n, k = source.info(f"{name}.weight", (dtype,), (None, None)).shape
    if not scheme.symmetric or (not scheme.floating and scheme.bits != 8):
        raise UserError(f"{name}: unpacked weights are read as symmetric int8 or float8 only", where=where)
    scale_shape = source.info(
        f"{name}.{SCALE}", FLOATS, (None,) * len(source.tensors[f"{name}.{SCALE}"].shape)
    ).shape
    groups = scale_groups(name, (n, k), scale_shape, scheme, where)
    stored = [f"{name}.weight", f"{name}.{SCALE}"]
    static = f"{name}.{INPUT_SCALE}"
    if scheme.activations == "tensor":
        source.info(
            static, FLOATS, (None,) * len(source.tensors[static].shape) if static in source.tensors else (1,)
        )
        stored.append(static)

    def read(key: str) -> Tensor:
        value = source.values[f"{name}.{key}"]
        if key == "weight":
            return value
        value = checked_scale(value.to(torch.float32) if scheme.floating else value, f"{name}.{key}", where)
        return value.reshape(1) if key == INPUT_SCALE else expanded(value, (n, k), groups, scheme.block)

    keys = ("weight", SCALE, INPUT_SCALE) if scheme.activations == "tensor" else ("weight", SCALE)
    operands, origin = LazyOperands(keys, read), tuple(stored)
    if scheme.floating:
        options = {"activations": scheme.activations or "none"}
        return QuantizedLinear(name, (n, k), reference.linear_fp8, operands, options, stored=origin)
    if not scheme.activations:
        return QuantizedLinear(name, (n, k), reference.linear_w8a16, operands, stored=origin)
    group = 0 if groups == 1 else k // groups
    return QuantizedLinear(
        name, (n, k), reference.linear_w8a8, operands, activation_group=group, stored=origin
    )


def scale_groups(
    name: str, shape: tuple[int, int], scale: tuple[int, ...], scheme: Scheme, where: str
) -> int:
    """The number of groups along K for scales of shape ``scale``."""
    n, k = shape
    if scheme.block is not None:
        high, wide = scheme.block
        if scale == (-(-n // high), -(-k // wide)) and (k % wide == 0 or scale[1] == 1):
            return scale[1]
    elif scale in ((), (1,), (1, 1), (n,), (n, 1)):
        return 1
    elif len(scale) == 2 and scale[0] == n and scheme.group_size and scale[1] * scheme.group_size == k:
        return scale[1]
    raise UserError(f"{name}.{SCALE} is {list(scale)}, its weight [{n}, {k}]", where=where)


def expanded(scale: Tensor, shape: tuple[int, int], groups: int, block: tuple[int, int] | None) -> Tensor:
    """``scale`` as [N, G]."""
    if block is not None:
        return scale.repeat_interleave(block[0], dim=0)[: shape[0]].contiguous()
    return scale.reshape(-1, groups).expand(shape[0], groups).contiguous()
