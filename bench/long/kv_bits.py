"""KV of fewer than 8 bits: the loss of quality in transformers, and the most that fewer bytes can save.

    python -m bench.long kv_bits artifact/ --model smollm2-135m

Each scheme quantizes the blocks of 32 tokens before the block of a query; the query's own block has int8, as in a cache
that packs a block when it is full. ``channel`` is a scale and a zero for each channel of a block (KIVI, arXiv
2402.02750; keys have channels of large values), ``token`` for each token and head. KL divergence from the same model
with float32 KV, over all positions of windows of the shipped text. The other half of the table is the engine: the time
per output token at 1,900 tokens, and at as many tokens as have the same bytes with int8. Unpacking comes on top, so
that is the least time that a kernel could reach.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.bounds import print_numbers
from optkit.checkpoint.locate import resolve
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.types import EngineRequest, SamplingParams
from optkit.text.corpora import load_text
from optkit.text.load import load_tokenizer

BLOCK, CONTEXT = 32, 1900
MOST_KL, MOST_RATIO = 0.005, 0.95
SCALE_BYTES = 4  # a scale and a zero in half precision; for int8 a float32 scale


@dataclass(frozen=True)
class Scheme:
    """Bits of K and V; ``channel`` keys share scales along a block, else the numbers of a token and head do."""

    name: str
    k_bits: int
    v_bits: int
    channel: bool = True
    group: int = 64  # numbers of a token and head that share a scale

    def token_bytes(self, dim: int) -> float:
        """Bytes of a token and head in K and V."""
        scales = dim / BLOCK if self.channel else dim / self.group
        return dim * (self.k_bits + self.v_bits) / 8 + SCALE_BYTES * (scales + dim / self.group)


INT8 = "int8, as it is"
SCHEMES = (
    Scheme("K8 channel V4 token", 8, 4),
    Scheme("K4 channel V8 token", 4, 8),
    Scheme("K6 channel V6 token", 6, 6),
    Scheme("K5 channel V5 token", 5, 5),
    Scheme("K4 channel V4 token", 4, 4),
    Scheme("K4 channel V4 token, groups of 32", 4, 4, group=32),
    Scheme("K4 token V4 token", 4, 4, channel=False),
    Scheme("K2 channel V2 token, groups of 32", 2, 2, group=32),
)


def spread(x: Tensor, bits: int, dim: int) -> Tensor:
    """``x`` rounded to ``bits``, between the least and the largest number along ``dim``."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    return ((x - low) / scale).round() * scale + low


def int8_rows(x: Tensor) -> Tensor:
    """``x`` [..., D] as in an int8 pool."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (x / scale).round() * scale


def packed(x: Tensor, bits: int, channel: bool, group: int) -> Tensor:
    """``x`` [B, H, T, D] rounded in blocks of ``BLOCK`` tokens; T is cut to whole blocks by the caller."""
    if channel:
        return spread(x.unflatten(2, (-1, BLOCK)), bits, 3).flatten(2, 3)
    return spread(x.unflatten(3, (-1, group)), bits, 4).flatten(3, 4)


class Attention:
    """Attention of transformers with quantized KV; ``scheme`` None is float32, ``INT8`` the rows of today."""

    def __init__(self) -> None:
        self.scheme: Scheme | str | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        shared, length = query.shape[1] // key.shape[1], key.shape[2]
        near_k, near_v = (key, value) if self.scheme is None else (int8_rows(key), int8_rows(value))
        far_k, far_v = near_k, near_v
        if isinstance(self.scheme, Scheme):
            whole, scheme = length // BLOCK * BLOCK, self.scheme
            far_k, far_v = near_k.clone(), near_v.clone()
            far_k[:, :, :whole] = packed(key[:, :, :whole], scheme.k_bits, scheme.channel, scheme.group)
            far_v[:, :, :whole] = packed(value[:, :, :whole], scheme.v_bits, False, scheme.group)
        place = torch.arange(length)
        near = place[:, None] // BLOCK == place[None] // BLOCK
        both = [x.repeat_interleave(shared, 1) for x in (near_k, near_v, far_k, far_v)]
        scores = torch.where(near, query @ both[0].mT, query @ both[2].mT) * scaling
        weights = scores.masked_fill(place[:, None] < place[None], float("-inf")).softmax(-1)
        out = (weights * near) @ both[1] + (weights * ~near) @ both[3]
        return out.transpose(1, 2), None


def divergences(directory: str, windows: list[list[int]]) -> dict[str, float]:
    """Mean KL of each scheme from float32 KV, nats."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    attention = Attention()
    AttentionInterface.register("bench_kv_bits", attention)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="bench_kv_bits"
    ).eval()
    found: dict[str, list[float]] = {}
    for window in windows:
        attention.scheme = None
        with torch.inference_mode():
            wanted = model(torch.tensor([window]), use_cache=False).logits[0].log_softmax(-1)
            for scheme in (INT8, *SCHEMES):
                attention.scheme = scheme
                logits = model(torch.tensor([window]), use_cache=False).logits[0].log_softmax(-1)
                name = scheme if isinstance(scheme, str) else scheme.name
                found.setdefault(name, []).append(float((wanted.exp() * (wanted - logits)).sum(-1).mean()))
    return {name: statistics.fmean(values) for name, values in found.items()}


def step_seconds(
    engine: Engine, lengths: Sequence[int], steps: int = 24, rounds: int = 8
) -> dict[int, float]:
    """The time of a decode step after each of ``lengths`` tokens: the median of rounds in turn."""
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for number in range(rounds):
        for length in lengths:
            params = SamplingParams(max_tokens=steps, temperature=0.0)
            ids = tuple((7 * i) % 30_000 + 100 for i in range(length - steps // 2))
            engine.add_request(
                EngineRequest(
                    request_id=f"{number}-{length}", prompt_ids=ids, sampling=params, arrival=time.monotonic()
                )
            )
            while not engine.step():
                pass
            while engine.has_work:
                start = time.perf_counter()
                engine.step()
                times[length].append(time.perf_counter() - start)
    return {length: statistics.median(found) for length, found in times.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.long kv_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("artifact", help="with int8 KV")
    parser.add_argument("--model", required=True, help="the source model of the artifact")
    parser.add_argument("--windows", type=int, default=2, help="stretches of text")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a stretch")
    parser.add_argument("--only", choices=("kl", "time"), help="one half of the table")
    args = parser.parse_args(arguments)
    times, kl = dict[str, float](), dict[str, float]()
    if args.only != "kl":
        times = ratios(open_engine(args.artifact))
    if args.only != "time":
        directory = str(resolve(args.model).directory)
        ids = load_tokenizer(directory)(load_text("evaluation"), add_special_tokens=False).input_ids
        starts = range(0, args.windows * 20_000, 20_000)
        kl = divergences(directory, [ids[at : at + args.context] for at in starts])
        print_numbers({f"KL, {INT8}": kl[INT8]}, [], 36, ".5f")
    print(f"{'scheme':36} {'KL, nats':>9} {'TPOT at least':>14}")
    for scheme in SCHEMES:
        loss, ratio = kl.get(scheme.name, math.nan), times.get(scheme.name, math.nan)
        missed = loss > MOST_KL or ratio > MOST_RATIO
        print(f"{scheme.name:36} {loss:9.5f} {ratio:13.3f}x{'   MISSED' * missed}")
    return 0


def ratios(engine: Engine) -> dict[str, float]:
    """The least time per output token of each scheme at ``CONTEXT`` tokens, as a share of that with int8."""
    spec = engine.runner.model.kv_specs[0]  # type: ignore[attr-defined]
    shares = {s.name: s.token_bytes(spec.head_dim) / (2 * (spec.head_dim + 4)) for s in SCHEMES}
    lengths = {name: round(CONTEXT * share) for name, share in shares.items()}
    times = step_seconds(engine, [CONTEXT, *sorted(set(lengths.values()))])
    print_numbers({f"TPOT at {CONTEXT} tokens, int8, ms": 1e3 * times[CONTEXT]}, [], 36, ".2f")
    return {name: times[length] / times[CONTEXT] for name, length in lengths.items()}
