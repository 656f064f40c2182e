"""kv_int8: stores the KV cache in int8, a quarter of the memory and of what decode reads for its context.

Each token and KV head has its own scale for K (after the rotary embedding) and for V: ``absmax / 127``, computed
when the token is written, so nothing is calibrated. K has channels of outliers, and a scale that spanned tokens or
heads would let one of them set the step for all; per token and head the rounding stays far below what int8 weights
cost. Attention reads every token from the cache, the new ones too. The choice is part of the graph
(``KVSpec.dtype``) and of no checkpoint tensor: the Hugging Face directory of the artifact does not change.

A row of D values is D + 4 bytes in place of 4 D: 0.27 of float32 at D = 64.
"""

from __future__ import annotations

from optkit.passes.quantization.kv import KVQuantization


class KVInt8(KVQuantization):
    name = "kv_int8"
    dtype = "int8"
