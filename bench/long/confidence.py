"""Confidence fallback: a token of the narrow form with a small margin is computed again in the wide form.

    python -m bench.long confidence --narrow artifact-edge/ --wide artifact/ --source smollm2-135m
    python -m bench.long confidence --group-size 128 --wide artifact/ --source smollm2-135m

With two forms of a model, prompts run in the wide form and decode steps in the narrow form. Here the forms are two
artifacts with the same KV cache, and every answer token of held-out text is computed in both, behind a prompt in the
wide form, with all tokens before as in the text. From the recorded rows follow, for each threshold on the margin (log
probability of the most likely token less the second): the rate of tokens computed twice, agreement and divergence from
the source model, and the time of a token from measured decode steps: ``narrow + rate * wide``. Beside the rule stand
the narrow form, the wide form, and a mix of both forms by chance in the same time. With ``--group-size`` the narrow
form is made here, unjudged: recipe ``edge-cpu`` with so many weights to a scale of ``w4a8``.

The rule pays in greedy answers where a threshold reaches the agreement of the wide form (less ``SLACK``) in at most
``LEAST`` of the time, and is better than the narrow form alone by two standard errors. Exit code 1: no threshold does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.bench.environment import environment
from optkit.capture import capture_directory
from optkit.checkpoint.locate import resolve
from optkit.errors import UserError
from optkit.evaluation.quality import ModuleLogits, compare_rows, evaluation_windows
from optkit.evaluation.speed import measure_pair
from optkit.lowering.lower import Executable, lower
from optkit.machine.target import get_target
from optkit.passes.base import PassContext
from optkit.passes.resolve import ResolvedPass, resolve_passes
from optkit.recipe.load import load_recipe, overridden
from optkit.recipe.schema import Recipe
from optkit.runtime.logits import RuntimeLogits
from optkit.text.load import load_tokenizer

THRESHOLDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # nats
FEW = 4  # tokens of a step in the narrow form
SLACK = 0.003  # of agreement
LEAST = 0.95  # of the time of the wide form
PROMPT, ANSWER = 256, 256  # tokens of a window


@dataclass(frozen=True)
class Recorded:
    """Each answer token: margin of the narrow form in nats, then whether each form agrees with the source, and KL."""

    margin: Tensor
    narrow: Tensor
    wide: Tensor
    narrow_kl: Tensor
    wide_kl: Tensor

    @staticmethod
    def joined(parts: Sequence[Recorded]) -> Recorded:
        return Recorded(
            *(torch.cat([getattr(part, name) for part in parts]) for name in Recorded.__annotations__)
        )


@dataclass(frozen=True)
class Row:
    """A rule: the share of tokens computed twice, time of a token in ms, agreement and mean KL with the source."""

    rule: str
    rate: float
    milliseconds: float
    agreement: float
    kl: float
    gain: float = 0.0  # of agreement over the narrow form, and its standard error
    gain_stderr: float = 0.0
    chance: float | None = None  # agreement of a mix of both forms by chance, in the same time


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.long confidence", __doc__)
    parser.add_argument("--narrow", type=Path, default=Path("artifact-edge"))
    parser.add_argument("--group-size", type=int, help="make the narrow form, with this group size")
    parser.add_argument("--wide", type=Path, default=Path("artifact"))
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    directory = resolve(args.source).directory
    few = made(directory, args.group_size) if args.group_size else Artifact.open(args.narrow).executable()
    forms = Forms(few, Artifact.open(args.wide).executable())
    if forms.narrow.states != forms.wide.states:
        raise UserError("the KV caches differ", where=str(args.narrow), fix="use recipes with kv_int8")
    recipe = Artifact.open(args.wide, verify=False).recipe
    windows = evaluation_windows(
        load_tokenizer(str(directory)), args.windows * (PROMPT + ANSWER), PROMPT + ANSWER
    )
    narrow, wide = step_milliseconds(forms, recipe)
    found = recorded(forms, ModuleLogits.load(directory), windows)
    rows = table(found, narrow, wide)
    show(rows, len(found.margin))
    best = [row for row in rows[2:] if pays(row, rows[1])]
    if args.save_result:
        result = {"kind": "confidence", "environment": environment(), "tokens": len(found.margin)}
        args.save_result.write_text(
            json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
    print(f"pays at {best[0].rule}" if best else "no threshold beats the wide form alone")
    return 0 if best else 1


class Forms:
    """A model of two forms: steps of few tokens run in the narrow one, prompts in the wide one."""

    def __init__(self, narrow: Executable, wide: Executable) -> None:
        self.narrow, self.wide = narrow, wide
        self.states, self.vocab_size = wide.states, wide.vocab_size
        self.max_model_len = min(narrow.max_model_len, wide.max_model_len)

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        form = self.narrow if len(inputs["input_ids"]) <= FEW else self.wide
        return form(inputs)


def recorded(forms: Forms, source: ModuleLogits, windows: Sequence[Sequence[int]]) -> Recorded:
    """The answer tokens of ``windows`` in both forms; the KV of the prompt is that of the wide form."""
    sides = [RuntimeLogits(model, chunk=2 * PROMPT, decode=ANSWER) for model in (forms, forms.wide)]
    streams = [side.logits(windows) for side in sides]
    parts = []
    for expected, *given in zip(source.logits(windows), *streams, strict=True):
        expected, low, high = (rows[PROMPT - 1 : -1] for rows in (expected, *given))
        best = low.topk(2).values
        narrow_kl, narrow = compare_rows(expected, low)
        wide_kl, wide = compare_rows(expected, high)
        parts.append(Recorded(best[:, 0] - best[:, 1], narrow, wide, narrow_kl, wide_kl))
    return Recorded.joined(parts)


def table(found: Recorded, narrow: float, wide: float) -> list[Row]:
    """The narrow form, the wide form, and the fallback at each threshold; ``narrow`` and ``wide`` in ms a token."""
    low, high = float(found.narrow.mean()), float(found.wide.mean())
    rows = [
        Row("narrow form", 0.0, narrow, low, float(found.narrow_kl.mean())),
        Row(
            "wide form",
            0.0,
            wide,
            high,
            float(found.wide_kl.mean()),
            *mean_and_error(found.wide - found.narrow),
        ),
    ]
    for threshold in THRESHOLDS:
        again = found.margin < threshold
        rate = float(again.float().mean())
        taken = narrow + rate * wide
        share = min(1.0, max(0.0, (taken - narrow) / (wide - narrow))) if wide > narrow else 1.0
        rows.append(
            Row(
                f"margin < {threshold:g}",
                rate,
                taken,
                float(torch.where(again, found.wide, found.narrow).mean()),
                float(torch.where(again, found.wide_kl, found.narrow_kl).mean()),
                *mean_and_error(torch.where(again, found.wide - found.narrow, 0.0)),
                low + share * (high - low),
            )
        )
    return rows


def pays(row: Row, wide: Row) -> bool:
    """True where the rule is as good as the wide form and faster, and better than the narrow form."""
    cheap = row.agreement >= wide.agreement - SLACK and row.milliseconds <= LEAST * wide.milliseconds
    return cheap and row.gain > 2 * row.gain_stderr


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean over tokens, and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def made(directory: Path, group_size: int) -> Executable:
    """The model in ``directory`` after the passes of ``edge-cpu`` with ``group_size`` weights to a scale."""
    recipe = load_recipe("edge-cpu", [f"passes.w4a8.group_size={group_size}"])
    graph, target = capture_directory(directory), get_target("cpu")
    context = PassContext(target)
    for resolved in resolve_passes(recipe):
        assert isinstance(resolved, ResolvedPass)  # the recipe has no candidates
        optimization = resolved.pass_class(resolved.config)
        plan = optimization.check(graph, context)
        if plan.sites:
            optimization.apply(graph, plan, context)
    return lower(graph, target, consume=True)


def step_milliseconds(forms: Forms, recipe: Recipe) -> tuple[float, float]:
    """The time of a decode step behind ``PROMPT`` tokens in the narrow and in the wide form, in interleaved rounds."""
    alone = overridden(recipe, {"workload.prompt_tokens": [PROMPT], "workload.batch": 1})
    times = measure_pair(forms.narrow, forms.wide, alone, lambda _: False).summary()
    (narrow, wide), *_ = (pair for label, pair in times.items() if not label.startswith("prefill"))
    return 1e3 * narrow["median"], 1e3 * wide["median"]


def show(rows: Sequence[Row], tokens: int) -> None:
    """Print a row a rule."""
    print(f"{tokens} answer tokens; time from decode steps at {PROMPT} tokens, one sequence")
    print(
        f"  {'rule':14} {'again':>6} {'ms/token':>8} {'agreement':>9} {'gain, points':>13} {'by chance':>9} {'KL':>8}"
    )
    for row in rows:
        chance = f"{row.chance:9.2%}" if row.chance is not None else f"{'':9}"
        print(
            f"  {row.rule:14} {row.rate:6.1%} {row.milliseconds:8.2f} {row.agreement:9.2%} "
            f"{100 * row.gain:5.2f} ± {100 * row.gain_stderr:5.2f} {chance} {row.kl:8.4f}"
        )
