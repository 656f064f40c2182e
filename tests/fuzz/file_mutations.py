"""Changes of an artifact's other files: tensors with their declarations, headers, the manifest, config and recipe."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any

from tests.fuzz.contents import CONFIG, RECIPE, Contents, Stored
from tests.fuzz.graph_mutations import Mutation
from tests.fuzz.values import INTS, like, places

# safetensors dtype: bytes, and the name in graph.json
DTYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"),
}


def any_tensor(dice: Random, contents: Contents) -> tuple[str, Stored]:
    """A tensor of the artifact and its name, small files as likely as large ones."""
    tensors = dice.choice([tensors for tensors in contents.tensors.values() if tensors])
    name = dice.choice(list(tensors))
    return name, tensors[name]


def declare(contents: Contents, name: str, tensor: Stored) -> None:
    """Have the graph declare the weight made of the one tensor ``name`` as the tensor is."""
    for weight, entry in contents.graph["weights"].items():
        made_of = [weight] if entry.get("constant") else [part[0] for part in entry["from"]]
        if made_of != [name]:
            continue
        shape = tensor.shape[::-1] if entry.get("transposed") else list(tensor.shape)
        entry["shape"], entry["dtype"] = shape, DTYPES[tensor.dtype][1]
        if not entry.get("constant") and shape:
            entry["from"] = [[name, tensor.shape[0]]]


def other_dtype(dice: Random, contents: Contents) -> str | None:
    """The same bytes as another dtype of the same size, or of another size with another last dimension."""
    name, tensor = any_tensor(dice, contents)
    old, size = tensor.dtype, DTYPES[tensor.dtype][0]
    tensor.dtype = dice.choice([d for d in DTYPES if d != old])
    if DTYPES[tensor.dtype][0] != size:
        count = len(tensor.data) // DTYPES[tensor.dtype][0]
        rows = tensor.shape[0] if tensor.shape and tensor.shape[0] and count % tensor.shape[0] == 0 else 1
        tensor.shape = [rows, count // rows] if len(tensor.shape) > 1 else [count]
        tensor.data = tensor.data[: count * DTYPES[tensor.dtype][0]]
    declare(contents, name, tensor)
    return f"tensor {name}: {old} is {tensor.dtype} {tensor.shape}"


def other_shape(dice: Random, contents: Contents) -> str | None:
    """The same bytes in another shape."""
    name, tensor = any_tensor(dice, contents)
    old, count = tensor.shape, math.prod(tensor.shape)
    rows = dice.choice([n for n in (1, 2, 3, 4, 8, 16, 32, 64, 128) if count % n == 0])
    columns = count // rows
    tensor.shape = dice.choice(
        ([rows, columns], [columns, rows], [count], [1, rows, columns], [rows, 1, columns])
    )
    declare(contents, name, tensor)
    return f"tensor {name}: {old} is {tensor.shape}"


def other_size(dice: Random, contents: Contents) -> str | None:
    """More or fewer elements along a dimension; what is new is zero bytes."""
    name, tensor = any_tensor(dice, contents)
    if not tensor.shape:
        return None
    old, axis = list(tensor.shape), dice.randrange(len(tensor.shape))
    size = tensor.shape[axis]
    tensor.shape[axis] = dice.choice((0, 1, size - 1, size + 1, size // 2, size * 2, size + 4, size + 8))
    tensor.shape[axis] = max(0, tensor.shape[axis])
    needed = math.prod(tensor.shape) * DTYPES[tensor.dtype][0]
    tensor.data = tensor.data[:needed].ljust(needed, b"\0")
    declare(contents, name, tensor)
    return f"tensor {name}: {old} is {tensor.shape}"


def other_bytes(dice: Random, contents: Contents) -> str | None:
    """A few bytes of a tensor, as a rule at its end or beginning; whole numbers more often than floats."""
    candidates = [
        (name, tensor)
        for tensors in contents.tensors.values()
        for name, tensor in tensors.items()
        if tensor.data and (tensor.dtype.startswith(("I32", "I64")) or dice.random() < 0.2)
    ]
    if not candidates:
        return None
    name, tensor = dice.choice(candidates)
    size, count = DTYPES[tensor.dtype][0], len(tensor.data) // DTYPES[tensor.dtype][0]
    at = dice.choice((0, count - 1, dice.randrange(count))) * size
    value = dice.choice(
        (b"\xff" * size, b"\x00" * (size - 1) + b"\x7f", b"\x80" * size, dice.randbytes(size))
    )
    tensor.data = tensor.data[:at] + value + tensor.data[at + size :]
    return f"tensor {name}: bytes {at} to {at + size} are {value.hex()}"


def share_bytes(dice: Random, contents: Contents) -> str | None:
    """A tensor under the name of another, of its own file or not."""
    name, tensor = any_tensor(dice, contents)
    other, source = any_tensor(dice, contents)
    tensor.dtype, tensor.shape, tensor.data = source.dtype, list(source.shape), source.data
    declare(contents, name, tensor)
    return f"tensor {name} is {other}"


def drop_tensor(dice: Random, contents: Contents) -> str | None:
    tensors = dice.choice([tensors for tensors in contents.tensors.values() if tensors])
    name = dice.choice(list(tensors))
    del tensors[name]
    return f"tensor {name} is gone"


def other_header(dice: Random, contents: Contents) -> str | None:
    """A header that contradicts its data."""
    file = dice.choice([file for file, tensors in contents.tensors.items() if tensors])
    name = dice.choice(list(contents.tensors[file]))
    key = dice.choice(("dtype", "shape", "data_offsets"))
    value: Any = {
        "dtype": dice.choice([*DTYPES, "F4", "X", 3, None]),
        "shape": [dice.choice(INTS) for _ in range(dice.randrange(4))],
        "data_offsets": [dice.choice(INTS) for _ in range(dice.choice((0, 1, 2, 2, 2, 3)))],
    }[key]
    contents.headers.append((file, name, key, value))
    return f"header of {file}: {key} of {name} is {value}"


def other_manifest(dice: Random, contents: Contents) -> str | None:
    """Any place of the manifest, after its hashes."""
    number = dice.randrange(1 << 30)

    def change(manifest: dict[str, Any]) -> None:
        again = Random(number)
        box, key = again.choice(list(places(manifest)))
        if again.random() < 0.4:
            del box[key]
        else:
            box[key] = like(again, box[key])

    contents.manifest_changes.append(change)
    return f"manifest: change {number}"


def other_config(dice: Random, contents: Contents) -> str | None:
    box, key = dice.choice(list(places(contents.data[CONFIG])))
    old = repr(box[key])[:60]
    if dice.random() < 0.3:
        del box[key]
        return f"config.json: {key!r} ({old}) is gone"
    box[key] = like(dice, box[key])
    return f"config.json: {key!r} ({old}) is {box[key]!r}"


def other_recipe(dice: Random, contents: Contents) -> str | None:
    """Another number in the recipe."""
    text = contents.other[RECIPE].decode()
    found = dice.choice(list(re.finditer(r"\d+", text)))
    number = dice.choice(INTS)
    contents.other[RECIPE] = f"{text[: found.start()]}{number}{text[found.end() :]}".encode()
    line = text[: found.start()].rpartition("\n")[2]
    return f"recipe: {line.strip()}{found[0]} is {number}"


MUTATIONS: dict[Mutation, int] = {
    other_dtype: 6,
    other_shape: 6,
    other_size: 8,
    other_bytes: 6,
    share_bytes: 3,
    drop_tensor: 1,
    other_header: 4,
    other_manifest: 4,
    other_config: 4,
    other_recipe: 3,
}
