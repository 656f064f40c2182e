"""Limits of measurements, by the size of the model and of the machine. Nothing heavy is imported."""

from __future__ import annotations

from optkit.machine.target import Target

Z_975 = 1.959964  # standard errors to each side of a mean: an interval of 95 %
WINDOW_TOKENS = 512  # of text that quality is measured on, at most
MEMORY_SHARE = 6  # float weights in memory take up to this part of it
QUALITY_FLOPS = 2e13  # of the source model in a measurement of quality: some minutes on two cores
LEAST_WINDOWS = 2  # without a second window there is no error of the mean over windows
FINAL_TOKENS = 20480  # of text that the quality of a whole result is measured on, by default
LEAST_FINAL_TOKENS = 1024
KEPT_ON_DISK = 8 << 30  # bytes of the logits of a large source model, kept for later comparisons


def weight_limit(target: Target) -> int:
    """Bytes of weights in memory at once, on a CPU; float weights beyond stay on disk."""
    return target.memory_bytes // MEMORY_SHARE


def most_tokens(parameters: float) -> int:
    """Tokens of text for a measurement of quality of a model of this size, in whole windows."""
    windows = int(QUALITY_FLOPS / (2 * max(parameters, 1) * WINDOW_TOKENS))
    return max(LEAST_WINDOWS, windows) * WINDOW_TOKENS
