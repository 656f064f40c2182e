"""kv_fp8: stores the KV cache in float8 E4M3, as many bytes as ``kv_int8``.

Each token and KV head has a scale for K and a scale for V, ``absmax / 448``, computed when the token is written. Within
a token values keep 3 bits of mantissa at every size, where int8 keeps 7 bits of the largest: E4M3 is finer for small
values and coarser for large values, and on most models the larger error. Hopper's kernels read E4M3.

On a CPU no kernel reads E4M3: attention runs by the reference, many times slower than ``kv_int8``; useful for measuring
quality, not for speed. So a CPU recipe leaves out ``flash_attention``, which pins a kernel.
"""

from __future__ import annotations

from optkit.passes.quantization.kv import KVQuantization


class KVFP8(KVQuantization):
    name = "kv_fp8"
    dtype = "fp8"
    by_reference = True
