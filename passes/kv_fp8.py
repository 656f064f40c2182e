"""kv_fp8: stores the KV cache in float8 E4M3, as many bytes as ``kv_int8``.

Each token and KV head has its own scale for K and for V, ``absmax / 448``, computed when the token is written. Within a
token values keep 3 bits of mantissa at every size, where int8 keeps 7 bits of the largest: E4M3 is finer for small
values and coarser for large ones, and on most models the larger error. It is the form that Hopper's kernels read.

On a CPU no kernel reads it: attention runs by the reference, many times slower than ``kv_int8``; good for its quality,
not for its speed. So it goes without ``flash_attention`` there, which pins a kernel.
"""

from __future__ import annotations

from optkit.passes.quantization.kv import KVQuantization


class KVFP8(KVQuantization):
    name = "kv_fp8"
    dtype = "fp8"
    by_reference = True
