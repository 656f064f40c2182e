"""Formats of quantized checkpoints, in and out: GPTQ, AWQ and compressed-tensors.

``source`` opens a checkpoint of any format under the names that graphs use; ``gptq``, ``awq`` and ``compressed`` each
say how their tensors map to those and back; ``layer`` is what they have in common.
"""
