"""Tensors that say they are on a GPU: what only a GPU can run is run without one, and watched.

An ``OnGPU`` tensor has device ``cuda:0``; what computes is the tensor inside it, which lies on the CPU (then numbers
are right) or on the meta device (then a model of any size fits). ``Machine`` is a dispatch mode that makes such tensors
where code asks for the device ``cuda``, and raises where a GPU would: tensors of both devices in one op, a copy to the
host or a number read while a graph is captured. What is captured is written down and runs again when it is replayed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CAPACITY = 141 << 30
ALIGNMENT = 512  # of what CUDA's allocator gives
READS = {  # what makes the host wait for the device
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.bincount.default, aten.repeat_interleave.Tensor, aten.is_nonzero.default,
}  # fmt: skip


class GPUError(AssertionError):
    """What a GPU would refuse, or do at the price of a stall where there must be none."""


class OnGPU(Tensor):
    """A tensor of device ``cuda:0``; ``inner`` has its numbers, or none on the meta device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGPU:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta", requires_grad=False,  # which PyTorch knows how to guard in every build
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **kwargs: Any) -> str:
        return f"OnGPU({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return Machine.now().address(self.inner)

    def pin_memory(self, *args: Any) -> Tensor:
        raise GPUError("memory of a GPU cannot be pinned")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Machine.now().run(func, args, kwargs or {})


class Tape:
    """What happened during a capture."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self.steps:
            step()


class Machine(TorchDispatchMode):
    """One GPU. ``inside`` is where its tensors really are: ``cpu`` or ``meta``.

    Attributes:
        reads: how often the host has waited for numbers of the device.
        tape: of the capture that is under way.
        allocated, peak: bytes of tensors on the GPU, now and at most.
    """

    _active: Machine | None = None

    def __init__(self, inside: str, capacity: int = CAPACITY) -> None:
        super().__init__()
        self.capacity = capacity
        self.inside = torch.device(inside)
        self.reads = 0
        self.tape: Tape | None = None
        self.allocated = self.peak = 0
        self.pinned: set[int] = set()
        self._addresses: dict[int, int] = {}
        self._next = itertools.count(1)

    @classmethod
    def now(cls) -> Machine:
        assert cls._active is not None, "no GPU is rehearsed"
        return cls._active

    @contextmanager
    def running(self) -> Iterator[Machine]:
        before, lifted = Machine._active, torch._C._only_lift_cpu_tensors()
        Machine._active = self
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with self:
                yield self
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            Machine._active = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    # -- ops -------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One op, on whichever device its arguments say."""
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        here = any(isinstance(leaf, OnGPU) for leaf in leaves)
        asked = kwargs.get("device")
        to = torch.device(asked) if asked is not None else None
        if kwargs.pop("pin_memory", None):
            made = func(*args, **kwargs)
            self.pinned.add(made.untyped_storage()._cdata)
            return made
        if not here and (to is None or to.type != "cuda"):
            return func(*args, **kwargs)
        if func in (aten.copy_.default, aten._to_copy.default):
            return self.copy(func, args, kwargs, to)
        if func._schema.name == "aten::to":  # which inference mode leaves as it is
            wanted = {
                k: v for k, v in kwargs.items() if k in ("dtype", "device", "non_blocking") and v is not None
            }
            return self.copy(aten._to_copy.default, args[:1], wanted, to)
        if func is aten.set_.source_Storage or func is aten.record_stream.default:
            raise GPUError(f"{func} is not rehearsed")
        self.check(func, args, leaves)
        check_vendor(func, args, kwargs)
        if func is aten._scaled_mm.default:
            return self.wrapped(scaled_mm, args, kwargs)
        if func in SPARSE:
            return self.wrapped(SPARSE[func], args, kwargs)
        return self.wrapped(func, args, kwargs)

    def check(self, func: Any, args: Any, leaves: list[Tensor]) -> None:
        strangers = [x for x in leaves if not isinstance(x, OnGPU) and x.device.type != "meta" and x.ndim > 0]
        on_meta = [x for x in leaves if not isinstance(x, OnGPU) and x.device.type == "meta"]
        if on_meta or strangers:
            places = {f"{x.device!s} {tuple(x.shape)} {x.dtype}" for x in leaves}
            raise GPUError(f"{func} of tensors on several devices: {sorted(places)}")
        if func in READS:
            self.read(str(func))

    def attend(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """``F.scaled_dot_product_attention``, as a whole."""
        q, k, v = args
        self.check("attention", args, [q, k, v])
        if not q.dtype == k.dtype == v.dtype or any(x.stride(-1) != 1 for x in args):
            raise GPUError(f"no fast attention for {[(x.dtype, x.stride()) for x in args]}")
        return self.wrapped(torch.nn.functional.scaled_dot_product_attention, args, kwargs)

    def index(self, fn: Callable[..., Any], args: Any, mutates: bool) -> Any:
        """``x[index]``, or its assignment."""
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        tensors = [x for x in (*indices, *args[2:]) if isinstance(x, Tensor)]
        self.check(fn, args, tensors)
        if any(x.dtype == torch.bool for x in indices if isinstance(x, Tensor)):
            self.read("a mask as index")
        return self.wrapped(fn, args, {}, mutates)

    def wrapped(
        self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], mutates: bool = False
    ) -> Any:
        """``fn`` of what is inside the arguments, and what it gives on the GPU again."""
        originals = {id(x.inner): x for x in tree_flatten((args, kwargs))[0] if isinstance(x, OnGPU)}
        inner_args, inner_kwargs = tree_map(self.unwrap, (args, kwargs))
        inner = fn(*inner_args, **inner_kwargs)
        if self.tape is not None:
            self.record(fn, inner_args, inner_kwargs, inner, mutates)
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type != "cuda":
            return inner

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return originals[id(value)] if id(value) in originals else self.put(value)

        return tree_map(wrap, inner)

    def put(self, inner: Tensor) -> OnGPU:
        self.address(inner)
        with torch.inference_mode(False):  # views of tensors from outside of it would not be made otherwise
            return OnGPU(inner)

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, OnGPU):
            return value.inner
        if isinstance(value, torch.device) and value.type == "cuda":
            return self.inside
        return value

    def record(self, fn: Callable[..., Any], args: Any, kwargs: Any, result: Any, mutates: bool) -> None:
        """Make a replay do this op again, into the memory that its result has now."""
        if self.inside.type == "meta":
            return
        inputs = {
            x.untyped_storage()._cdata for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)
        }
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        fresh = [x.untyped_storage()._cdata not in inputs for x in outputs]
        mutates = mutates or getattr(getattr(fn, "_schema", None), "is_mutable", False)
        if not any(fresh) and not mutates:
            return  # a view: its memory is what it shows

        def again() -> None:
            for old, new, own in zip(outputs, flat(fn(*args, **kwargs)), fresh, strict=True):
                if own:
                    old.copy_(new)

        assert self.tape is not None
        self.tape.steps.append(again)

    # -- copies, reads, memory ---------------------------------------------------------------------------

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any], to: torch.device | None) -> Any:
        """Between the devices; the pieces of ``copy_`` and ``to`` that cross are looked at."""
        if func is aten.copy_.default:
            into, source = args[0], args[1]
            gpu, from_gpu = isinstance(into, OnGPU), isinstance(source, OnGPU)
            quick = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            if gpu and from_gpu:
                return self.wrapped(func, args, kwargs)
            if not (gpu or from_gpu):
                return func(*args, **kwargs)
            self.cross(source, into, quick)
            inner = [self.unwrap(x) for x in (into, source)]
            if not any(x.device.type == "meta" for x in inner):
                inner[0].copy_(inner[1])
            return into
        source = args[0]
        leaves = isinstance(source, OnGPU) and to is not None and to.type != "cuda"
        if leaves and to is not None and to.type == "cpu":
            self.cross(source, None, bool(kwargs.get("non_blocking")))
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            inner = source.inner
            held = torch.zeros(inner.shape, dtype=inner.dtype) if inner.device.type == "meta" else inner
            return func(held, **kwargs, device=torch.device("cpu"))
        if leaves:
            return func(source.inner, **kwargs)
        if not isinstance(source, OnGPU):
            self.cross(source, None, bool(kwargs.get("non_blocking")))
        return self.wrapped(func, args, kwargs)

    def cross(self, source: Tensor, into: Tensor | None, quick: bool) -> None:
        host = into if isinstance(source, OnGPU) else source
        pinned = host is not None and host.untyped_storage()._cdata in self.pinned
        if isinstance(source, OnGPU) and not (quick and pinned):
            self.read("a copy to the host")
        elif self.tape is not None and host is not None and not pinned:
            raise GPUError("a copy from memory that is not pinned, in a capture")

    def read(self, what: str) -> None:
        if self.tape is not None:
            raise GPUError(f"{what} makes the host wait, in a capture")
        self.reads += 1

    def address(self, inner: Tensor) -> int:
        """Where ``inner`` would lie; its memory counts as allocated while it lives."""
        storage = inner.untyped_storage()
        key = storage._cdata
        if key not in self._addresses:
            self._addresses[key] = next(self._next) << 40
            size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            if self.allocated > self.capacity:
                raise GPUError(f"out of memory: {self.allocated >> 20} MiB")
            weakref.finalize(inner, self.maybe_free, key, size, weakref.ref(inner))
        return self._addresses[key] + inner.storage_offset() * inner.element_size()

    def maybe_free(self, key: int, size: int, *_: Any) -> None:
        self.allocated -= size
        self._addresses.pop(key, None)


def flat(result: Any) -> list[Tensor]:
    return [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]


# -- what NVIDIA's libraries ask for ------------------------------------------------------------------------


def check_vendor(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """The conditions of ``_scaled_mm`` with row-wise scales, and of ``_int_mm``, on a GPU."""
    if func is aten._scaled_mm.default:
        given = scaled_mm_arguments(args, kwargs)
        a, b, scale_a, scale_b, bias = args[0], args[1], args[2], args[3], given["bias"]
        (m, k), n = a.shape, b.shape[1]
        demands = {
            "both are E4M3": a.dtype == b.dtype == torch.float8_e4m3fn,
            "a is row-major and b column-major": a.stride(1) == 1 and b.stride(0) == 1 and b.stride(1) >= k,
            "K and N are multiples of 16": k % 16 == 0 and n % 16 == 0,
            "scales are float32": scale_a.dtype == scale_b.dtype == torch.float32,
            "scales are [M, 1] and [1, N]": scale_a.shape == (m, 1) and scale_b.shape == (1, n),
            "scales lie side by side": scale_a.is_contiguous() and scale_b.is_contiguous(),
            "the result is bfloat16": given["out_dtype"] == torch.bfloat16,
            "the bias is bfloat16": bias is None or bias.dtype == torch.bfloat16,
        }
    elif func is aten._int_mm.default:
        a, b = args[:2]
        demands = {
            "both are int8": a.dtype == b.dtype == torch.int8,
            "more than 16 rows": a.shape[0] > 16,
            "K and N are multiples of 8": a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0,
        }
    elif func is aten._cslt_compress.default:
        (weight,) = args
        demands = {
            "the weight is of 16 bits": weight.dtype in (torch.bfloat16, torch.float16),
            "sides are multiples of 16": weight.ndim == 2 and not any(size % 16 for size in weight.shape),
            "rows lie side by side": weight.is_contiguous(),
        }
    elif func is aten._cslt_sparse_mm.default:
        weight, dense, bias = args[0], args[1], given_bias(args, kwargs)
        demands = {
            "both have one type": weight.dtype == dense.dtype and (bias is None or bias.dtype == dense.dtype),
            "columns are a multiple of 8": dense.shape[1] % 8 == 0,
            "b is row-major or column-major": 1 in dense.stride(),
        }
    else:
        return
    broken = [text for text, held in demands.items() if not held]
    if broken:
        raise GPUError(f"{func}: {', '.join(broken)}")


def scaled_mm_arguments(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in aten._scaled_mm.default._schema.arguments]
    defaults = {"bias": None, "out_dtype": None}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    """What ``_scaled_mm`` computes, with or without numbers."""
    given = scaled_mm_arguments(args, kwargs)
    product = (args[0].to(torch.float32) @ args[1].to(torch.float32)) * args[2] * args[3]
    return (product if given["bias"] is None else product + given["bias"]).to(given["out_dtype"])


def given_bias(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The bias of ``_cslt_sparse_mm``."""
    return args[2] if len(args) > 2 else kwargs.get("bias")


def cslt_compress(weight: Tensor) -> Tensor:
    """What ``_cslt_compress`` gives: kept values, then their places, in the layout of PyTorch's CUTLASS tensors."""
    from torch.sparse import _semi_structured_conversions as conversions

    if weight.device.type == "meta":
        return weight.new_empty(weight.numel() * 9 // 16)
    kept, places = conversions.sparse_semi_structured_from_dense_cutlass(weight)
    return torch.cat([kept.flatten(), places.flatten().view(weight.dtype)])


def cslt_sparse_mm(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    *others: Any,
) -> Tensor:
    """What ``_cslt_sparse_mm`` computes, with or without numbers."""
    from torch.sparse import _semi_structured_conversions as conversions

    k, n = dense.shape
    m = packed.numel() * 16 // 9 // k
    if packed.device.type == "meta":
        return dense.new_empty((n, m) if transpose_result else (m, n))
    kept, places = packed[: m * k // 2].view(m, -1), packed[m * k // 2 :].view(torch.int16).view(m, -1)
    weight = conversions.sparse_semi_structured_to_dense_cutlass(kept, places)
    product = weight.float() @ dense.float()
    product = (product if bias is None else product + bias.float()[:, None]).to(dense.dtype)
    return product.t().contiguous() if transpose_result else product


SPARSE = {aten._cslt_compress.default: cslt_compress, aten._cslt_sparse_mm.default: cslt_sparse_mm}
