"""kv_int8: stores the KV cache in int8, a quarter of the memory and of decode's reads for the context.

Each token and KV head has a scale for K (after the rotary embedding) and a scale for V: ``absmax / 127``, computed when
the token is written, so nothing is calibrated. K has channels of outliers. With a scale across tokens or heads, a
single outlier would set the step for all tokens or heads. With a scale per token and head, the rounding error stays far
below the error of int8 weights. Attention reads every token from the cache, new tokens too. The choice is part of the
graph (``KVSpec.dtype``) and of no checkpoint tensor: the Hugging Face directory of the artifact does not change.

A row of D values is D + 4 bytes in place of 4 D: 0.27 of float32 at D = 64.
"""

from __future__ import annotations

from optkit.passes.quantization.kv import KVQuantization


class KVInt8(KVQuantization):
    name = "kv_int8"
    dtype = "int8"
