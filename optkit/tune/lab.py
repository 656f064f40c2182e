"""The work of a tuning on a machine: building artifacts, calibrating, serving, measuring.

The search (``optkit.tune.search``) decides on the work and never does the work, so tests of the search have another
``Lab``. Builds and calibrations run in child processes, which can be ended at a time, and the memory is free again for
servers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from optkit.bench import client, servers, workload
from optkit.bench.environment import environment
from optkit.bench.records import RequestRecord, span
from optkit.bench.slo import Load
from optkit.bench.workload import RequestSchedule, WorkloadConfig
from optkit.errors import UserError
from optkit.evaluation.limits import Z_975
from optkit.machine.parent import end_with_parent
from optkit.recipe.engine_options import engine_options
from optkit.recipe.schema import Accept, Recipe
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.pace import recorded
from optkit.simulation.step_costs import MeasuredStep, fit
from optkit.tune.calibration import Calibration, ProbeRun, fit_server
from optkit.tune.settings import Setting
from optkit.tune.step_times import step_process, steps_in_a_process

if TYPE_CHECKING:
    from optkit.checkpoint.locate import ModelSource

SETTLE = 0.5  # seconds between runs: the threads of the last server go to sleep
CALIBRATION_SECONDS = (
    60.0  # at most, of measured steps (and the rest of loading), and of each run of requests
)
TAIL = 10.0  # seconds that a run may take longer than its arrivals, at least
WARM_UPS = 2
PROBES = ((1, 128, 8, 8), (1, 512, 8, 5), (8, 128, 16, 24))  # (clients, prompt, output, requests) over HTTP
# (prompt, output, requests) at random times, at half of the throughput of the last of PROBES
OPEN_PROBE = (128, 16, 16)

Run = Callable[[Setting, RequestSchedule, float], list[RequestRecord]]


@dataclass(frozen=True)
class Shape:
    """The requests of a tuning: lengths in tokens, and the load."""

    input_len: int
    output_len: int
    load: Load

    def config(self, count: int, seed: int) -> WorkloadConfig:
        """``count`` requests at the load."""
        return WorkloadConfig(count, self.input_len, self.output_len, self.load.clients, self.load.rate, seed)

    def duration(self, count: int) -> float:
        """Seconds over which ``count`` requests arrive; 0 for clients without pauses."""
        return count / self.load.rate if self.load.rate else 0.0


class Lab(Protocol):
    """The work of a search on a machine."""

    def build(self, name: str, timeout: float) -> dict[str, Any]:
        """Build recipe ``name``: ``{"artifact": directory, "quality": lines}``.

        Raises:
            UserError: no result in time, or a quality interval across the bound.
        """
        ...

    def calibrate(self, name: str) -> dict[str, Any]:
        """``Calibration`` of recipe ``name`` as JSON data."""
        ...

    def recipe(self, name: str) -> Recipe: ...

    def scheduler_config(self, setting: Setting) -> SchedulerConfig:
        """The limits of a server with ``setting``.

        Raises:
            UserError: the options contradict each other or the model.
        """
        ...

    def requests(self, count: int, seed: int) -> RequestSchedule: ...

    def serving(self, settings: Sequence[Setting]) -> AbstractContextManager[tuple[Run, dict[Setting, str]]]:
        """A context with a server for each of ``settings``; gives ``Run``, and failed settings with reasons."""
        ...


class Machine:
    """The ``Lab`` of the machine at hand.

    Args:
        model: as for ``optkit optimize``.
        recipes: by the names in settings.
        directory: gets ``artifacts/``.
    """

    def __init__(
        self,
        model: str,
        recipes: Mapping[str, str],
        directory: Path,
        shape: Shape,
        progress: Callable[[str], None],
    ) -> None:
        from optkit.recipe.load import load_recipe

        self.model, self.directory, self.shape, self.progress = model, directory, shape, progress
        self.sources = dict(recipes)
        self.recipes = {name: load_recipe(source) for name, source in recipes.items()}
        self._ids: list[int] = []
        self._facts: dict[str, Any] = {}

    @cached_property
    def source(self) -> ModelSource:
        """The model, hashed once."""
        from optkit.checkpoint.locate import resolve

        return resolve(self.model, self.progress)

    def recipe(self, name: str) -> Recipe:
        return self.recipes[name]

    def check_lengths(self) -> None:
        """Refuse requests that are longer than the context, before anything is built.

        Raises:
            UserError: with the limit.
        """
        from optkit.pipeline.dry_graph import capture_planned

        context = capture_planned(self.source.directory).meta.max_model_len
        wanted = self.shape.input_len + self.shape.output_len
        for name, recipe in self.recipes.items():
            limit = min(context, recipe.runtime.max_model_len or context)
            if wanted > limit:
                what = f"requests of {self.shape.input_len} tokens in and {self.shape.output_len} out are too long"
                fix = f"the context is {limit} tokens: give a smaller --input-len or --output-len"
                raise UserError(what, where=f"{self.source.name} by recipe {name}", fix=fix)

    def artifact(self, name: str) -> Path:
        return self.directory / "artifacts" / name

    def build(self, name: str, timeout: float) -> dict[str, Any]:
        """The artifact of recipe ``name``; an existing artifact of the same recipe is taken."""
        from optkit.artifact.open import Artifact

        out = self.artifact(name)
        if not self._is_built(name):
            words = ["optimize", self.model, "--recipe", self.sources[name], "--out", str(out), "--force"]
            _command([sys.executable, "-m", "optkit.cli.main", *words], timeout, f"recipe {name}")
        artifact = Artifact.open(out)
        report = json.loads((out / "optkit" / "report.json").read_text("utf-8"))
        lines, crossed = quality(report.get("whole"), artifact.recipe.accept)
        if crossed:
            raise UserError(f"the quality interval crosses its bound: {'; '.join(crossed)}", where=name)
        return {"artifact": str(out), "quality": lines, "digest": artifact.manifest.get("digest", "")}

    def _is_built(self, name: str) -> bool:
        """True where a whole artifact of the model and the recipe is there."""
        from optkit.artifact.open import Artifact

        try:
            found = Artifact.open(self.artifact(name))
        except UserError:
            return False
        source = found.manifest["source"]["digest"]
        return found.recipe == self.recipes[name] and source == self.source.digest

    def calibrate(self, name: str) -> dict[str, Any]:
        """A ``Calibration`` of the artifact of ``name``: steps before and after requests to a server.

        The speed of a shared machine changes within a minute; the mean of both is near that of the requests between.
        The engine that measures steps loads while the server starts, where the memory has room for both.
        """
        start = time.monotonic()
        plain = Setting(name)
        directory, seconds = self.artifact(name), CALIBRATION_SECONDS
        steps: list[MeasuredStep] = []
        runs: list[ProbeRun] = []
        with ExitStack() as stack:
            measure: Callable[[], list[MeasuredStep]]
            if self.without_room(plain, beside=1, engines=2):
                measure = partial(steps_in_a_process, directory, {}, seconds)
                steps += measure()
            else:
                measure = stack.enter_context(step_process(directory, {}, seconds))
            with self.serving([plain]) as (run, failed):
                if failed:
                    raise UserError(failed[plain], where=name)
                if not steps:
                    time.sleep(SETTLE)
                    steps += measure()
                runs = self.probe(plain, run)
            steps += measure()
        limits = self.scheduler_config(plain)
        costs, added = fit_server(limits, fit(steps), runs)
        return Calibration(costs, added, time.monotonic() - start, recorded(steps)).to_dict()

    def probe(self, setting: Setting, run: Run) -> list[ProbeRun]:
        """The runs of a calibration: clients without pauses, then requests at random times.

        Raises:
            UserError: a request fails.
        """

        def measured(config: WorkloadConfig) -> ProbeRun:
            schedule = workload.build(config, self.ids())
            records = run(setting, schedule, CALIBRATION_SECONDS)
            refuse_failures(records, f"calibration of {setting.key}")
            return ProbeRun(config.max_concurrency, schedule.requests, records)

        runs = [
            measured(WorkloadConfig(count, length, output, clients, None, 900_000 + number))
            for number, (clients, length, output, count) in enumerate(PROBES)
        ]
        (length, output, count), saturated = OPEN_PROBE, runs[-1].records
        rate = 0.5 * len(saturated) / span(saturated)
        return [*runs, measured(WorkloadConfig(count, length, output, None, rate, 900_000 + len(PROBES)))]

    def scheduler_config(self, setting: Setting) -> SchedulerConfig:
        from optkit.runtime.sizing import scheduler_config

        options = engine_options(self.recipes[setting.recipe], dict(setting.options))
        return scheduler_config(self._model(setting.recipe), options, "cpu")

    def _model(self, name: str) -> Any:
        """The facts of a lowered model for the scheduler's limits."""
        from types import SimpleNamespace

        from optkit.artifact.open import Artifact

        if name not in self._facts:
            meta = Artifact.open(self.artifact(name), verify=False).meta()
            self._facts[name] = SimpleNamespace(
                states=meta.states,
                kv_specs=meta.kv_specs,
                max_model_len=meta.max_model_len,
                variant_limits=(),
            )
        return self._facts[name]

    def ids(self) -> list[int]:
        """Tokens to cut prompts from."""
        if not self._ids:
            from optkit.text.load import load_tokenizer

            self._ids = workload.text_ids(load_tokenizer(str(self.source.directory)))
        return self._ids

    def requests(self, count: int, seed: int) -> RequestSchedule:
        return workload.build(self.shape.config(count, seed), self.ids())

    @contextmanager
    def serving(self, settings: Sequence[Setting]) -> Iterator[tuple[Run, dict[Setting, str]]]:
        """Start a server for each setting; the second value has the settings without a server, with the reason."""
        urls: dict[Setting, tuple[str, str]] = {}
        failed: dict[Setting, str] = {}
        with ExitStack() as stack:
            for setting in settings:
                if reason := self.without_room(setting, beside=len(urls)):
                    failed[setting] = reason
                    continue
                self.progress(f"starting {setting.key}")
                port = servers.free_port()
                command = servers.optkit_command(self.artifact(setting.recipe), port) + setting.flags()
                try:
                    url = stack.enter_context(servers.running(command, port))
                    urls[setting] = url, servers.model_name(url)
                except UserError as error:
                    failed[setting] = str(error)

            def run(setting: Setting, schedule: RequestSchedule, limit: float) -> list[RequestRecord]:
                time.sleep(SETTLE)
                return client.run_workload(*urls[setting], schedule, limit=limit)

            for setting in urls:
                config = WorkloadConfig(WARM_UPS, 64, 4, 1, None, 800_000)
                run(setting, workload.build(config, self.ids()), CALIBRATION_SECONDS)
            yield run, failed

    def without_room(self, setting: Setting, beside: int, engines: int = 1) -> str:
        """The reason why the memory has no room for ``engines`` of ``setting`` beside others; empty where it has.

        The only server is started in any case: an estimate is no reason to measure nothing.
        """
        from optkit.artifact.open import Artifact
        from optkit.machine.memory import available_bytes
        from optkit.serve.models.memory import estimated_bytes

        if not beside:
            return ""
        options = engine_options(self.recipes[setting.recipe], dict(setting.options))
        artifact = Artifact.open(self.artifact(setting.recipe), verify=False)
        need, free = engines * estimated_bytes(artifact, options), available_bytes()
        if need <= free:
            return ""
        return (
            f"no memory for a server beside {beside} others: it needs about {need / 1e9:.2g} GB, "
            f"{free / 1e9:.2g} GB are available"
        )

    def conditions(self) -> dict[str, Any]:
        """Facts about the machine for the log."""
        return environment()


def refuse_failures(records: Sequence[RequestRecord], name: str) -> None:
    """Refuse a run whose requests were not all answered: what is left is the faster part.

    Raises:
        UserError: with the first error.
    """
    failed = [record.error for record in records if not record.ok]
    if failed:
        what = f"{len(failed)} of {len(records)} requests failed: {failed[0]}"
        fix = "try some by hand with optkit serve and optkit bench --url"
        raise UserError(what, where=name, fix=fix)


def quality(whole: Mapping[str, Any] | None, accept: Accept) -> tuple[list[str], list[str]]:
    """Lines on the quality of an artifact with 95 % intervals, and the lines of intervals across a bound.

    Args:
        whole: of report.json; None where no pass changed the model.
    """
    if not whole or not whole.get("quality"):
        return ["the weights and operators are those of the source model"], []
    found = whole["quality"] | {"long_loss": (whole["quality"].get("long") or {}).get("loss")}
    lines, crossed = [], []
    for key, name, bound, is_upper in (
        ("kl_mean", "mean KL divergence", accept.max_kld, True),
        ("top1_agreement", "top-1 agreement", accept.min_top1, False),
        ("long_loss", "long loss", accept.max_long_loss, True),
    ):
        mean = found.get(key)
        if mean is None:
            continue
        half = Z_975 * float(mean["stderr"])
        low, high = mean["value"] - half, mean["value"] + half
        line = f"{name} {mean['value']:.4g} [{low:.4g}, {high:.4g}]"
        if bound is not None:
            line += f", bound {bound:g}"
            if not (high <= bound if is_upper else low >= bound):
                crossed.append(line)
        lines.append(line)
    return lines, crossed


def _command(command: Sequence[str], timeout: float, what: str) -> None:
    """Run ``command``.

    Raises:
        UserError: the command failed or took longer than ``timeout`` seconds.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        fix = "finished passes are cached: run again, or give a larger --budget"
        raise UserError(f"not built within {timeout:.0f} s", where=what, fix=fix) from None
    finally:
        servers.stop(process)
    if process.returncode:
        raise UserError(" ".join(errors.decode(errors="replace").split())[-600:], where=what)
