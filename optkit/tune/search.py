"""The search: recipes to build, settings to simulate, to race and to confirm, within a budget of time.

1. **Candidates.** Each recipe is built (once; results are cached by content) and calibrated. A recipe with a quality
   interval across a bound is out.
2. **Simulation** of the serve options of each candidate (``settings.grid``), as many as fit the budget.
3. **Race** of the best few with the default: interleaved rounds, the same prompts and arrivals for all. A setting is
   dropped when the interval of the paired log-ratio to the best lies above 1.
4. **Default preferred.** The winner must beat the default, and then each changed option must earn a place: without the
   change the setting must be slower, by an interval without the value 1.
5. **Confirmation** (``optkit.tune.confirmation``) on fresh prompts, with the requests needed for the percentile. The
   worst order of arrivals is the claim.

Each trial is in the journal. Decisions follow from trials alone, and never from the clock, except where the budget
ends a phase; the end of a phase is a trial too, so a resumed run decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from optkit.bench.slo import Slo
from optkit.bench.statistics import samples_needed
from optkit.bench.workload import BenchRequest, RequestSchedule
from optkit.errors import UserError
from optkit.simulation.simulator import Simulation, simulate, simulate_rate
from optkit.simulation.step_costs import StepCosts
from optkit.tune import goal
from optkit.tune.calibration import Calibration
from optkit.tune.confirmation import BUDGET_ENDED, ORDERS, confirm
from optkit.tune.intervals import Ratio, paired_ratio
from optkit.tune.journal import Journal, Trial
from optkit.tune.lab import TAIL, Lab, Shape
from optkit.tune.outcome import Outcome
from optkit.tune.serving import Servers
from optkit.tune.settings import Setting, gains_by_guesses, grid, speculating

BUILD_SHARE = 0.45  # of the budget
SIMULATION_SHARE = 0.15  # of the budget
RACE_SHARE = 0.6  # of what is left before confirming
RACERS = 4  # beside the default
MOST_OF_ONE = 2  # racers of a recipe
LEAST_ROUNDS, MOST_ROUNDS = 3, 6
ROUND_SECONDS = 12.0
ROUND_REQUESTS = (8, 40)
SIMULATED_REQUESTS = 60
NEAR = 1.02  # costs that a simulation can't tell apart
DIFFERENT = 0.005  # relative difference of costs, from which a setting does something
HOPELESS = 2.0  # times the best simulated cost: not raced
LIMIT_FACTOR = 2.0  # of a run's arrivals, until unfinished requests are cut off
START_SECONDS = 15.0  # assumed for a server
ASSUMED_REQUEST_SECONDS = 0.5  # seconds, until the simulation knows more
SEED_RACE, SEED_SIMULATE = 1000, 3000  # apart from each other and from confirmation.SEED: fresh prompts


class Search:
    """A tuning.

    Args:
        names: recipes, the default first.
        budget: seconds, trials of an interrupted run included.
    """

    def __init__(
        self,
        lab: Lab,
        journal: Journal,
        slo: Slo,
        shape: Shape,
        names: Sequence[str],
        budget: float,
        seed: int = 0,
        progress: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.lab, self.journal, self.slo, self.shape = lab, journal, slo, shape
        self.names, self.budget, self.seed, self.progress = list(names), budget, seed, progress
        self.outcome = Outcome()
        self.calibrations: dict[str, Calibration] = {}
        self.simulated: dict[Setting, dict[str, Any]] = {}
        self.request_seconds = ASSUMED_REQUEST_SECONDS  # between two requests of clients without pauses

    # -- time -----------------------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """The rest of the budget, in seconds."""
        return self.budget - self.journal.elapsed

    def confirm_seconds(self) -> float:
        """The time of a confirmation with a miss in each order, in seconds."""
        count = samples_needed(100 * goal.needed_share(self.slo), misses=1)
        return START_SECONDS + ORDERS * self.duration(count)

    def duration(self, count: int) -> float:
        """The time of a run of ``count`` requests without a backlog, in seconds."""
        return self.shape.duration(count) or count * self.request_seconds

    def longest(self, count: int) -> float:
        """Seconds after which a run of ``count`` requests is cut off."""
        return LIMIT_FACTOR * self.duration(count) + TAIL

    def is_time(self, key: str, seconds: float) -> bool:
        """True if ``seconds`` are left before the confirmation; the answer is recorded, for a resumed run."""
        return bool(self.journal.trial(self.of_budget(f"time {key}"), lambda: self.left >= seconds).result)

    def of_budget(self, key: str) -> str:
        """The key of a trial with an outcome by the budget: with another budget the trial runs again."""
        return f"{key} of {self.budget:g} s"

    # -- phases ---------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Search, and give the outcome."""
        self._candidates()
        if not self.calibrations:
            self.outcome.reasons.append("no recipe could be built and served")
            return self.outcome
        self._simulate()
        default = Setting(next(name for name in self.names if name in self.calibrations))
        self.outcome.default = default
        racers = self._racers(default)
        costs = self._race("race", racers, default)
        best = self._chosen(costs, default) if costs else self._unraced(racers, default)
        able = self._runners_up(costs, default)
        misses = best in costs and _level(costs[best]) > 1  # in the race
        for setting in dict.fromkeys([*able, best] if misses else [best, *able]):
            if confirm(self, setting):
                break
            if not self.is_time(f"confirm another than {setting.key}", self.confirm_seconds()):
                self.outcome.notes.append("the budget ended before another setting could be confirmed")
                break
        assert self.outcome.setting is not None
        if self.outcome.setting != default:
            self.outcome.against_default = self._ratio(costs, self.outcome.setting, default)
        self.outcome.quality = self._built(self.outcome.setting.recipe, 0.0).result["quality"]
        row = self.simulated.get(self.outcome.setting, {})
        known = "" if row.get("known", True) else ", beyond 90 % load: not known"
        self.outcome.simulated = f"{row['values']}{known}" if row.get("values") else ""
        if not self.outcome.held:
            self._advise(self.outcome.setting)
        return self.outcome

    def _candidates(self) -> None:
        """Build and calibrate each recipe."""
        longest = 0.0
        for name in self.names:
            share = BUILD_SHARE * self.budget - (self.budget - self.left)
            timeout = share if self.calibrations else max(share, self.left - self.confirm_seconds())
            if not self.is_time(f"build {name}", self.budget - BUILD_SHARE * self.budget + longest / 2):
                self.outcome.notes.append(f"recipe {name}: no time in the budget")
                continue
            self.progress(f"building {name}")
            built = self._built(name, timeout)
            longest = max(longest, built.seconds)
            if built.result is None:
                self.outcome.notes.append(f"recipe {name}: {built.reason}")
                continue
            self.progress(f"calibrating {name}")
            found = self.journal.trial(f"calibrate {name}", partial(self.lab.calibrate, name))
            if found.result is None:
                self.outcome.notes.append(f"recipe {name}: {found.reason}")
                continue
            self.calibrations[name] = Calibration.from_dict(found.result)

    def _built(self, name: str, timeout: float) -> Trial:
        """The build of a recipe; a failed build is tried again with another budget alone."""
        earlier = [
            t for key, t in self.journal.trials.items() if key.startswith(f"build {name} of ") and t.result
        ]
        if earlier:
            return earlier[0]
        return self.journal.trial(self.of_budget(f"build {name}"), partial(self.lab.build, name, timeout))

    def simulation(
        self, setting: Setting, requests: Sequence[BenchRequest], costs: StepCosts | None = None
    ) -> Simulation:
        """The simulated run of ``setting``, with other ``costs`` than the calibrated ones where given.

        Raises:
            UserError: the options contradict each other or the model.
        """
        known = self.calibrations[setting.recipe]
        config = self.lab.scheduler_config(setting)
        load, steps, added, pace = self.shape.load, costs or known.costs, known.overheads, known.pace
        if load.rate is None:
            return simulate(config, steps, requests, clients=load.clients, overheads=added, pace=pace)
        return simulate_rate(config, steps, requests, load.rate, added, pace)

    def _simulate(self) -> None:
        """Simulate the settings of each candidate, settings with few changes first, as long as there is time."""
        requests = self.lab.requests(SIMULATED_REQUESTS, self.seed + SEED_SIMULATE)
        share = SIMULATION_SHARE * self.budget / len(self.calibrations)
        for name in self.calibrations:
            self.progress(f"simulating settings of {name}")
            found = self.journal.trial(f"simulate {name}", partial(self._grid, name, requests, share))
            for row in found.result or []:
                self.simulated[Setting.from_dict(row)] = row
        plain = [self.simulated[s] for s in map(Setting, self.calibrations) if s in self.simulated]
        self.request_seconds = max(
            (row["seconds"] / SIMULATED_REQUESTS for row in plain if not row["reason"]),
            default=self.request_seconds,
        )

    def _grid(self, name: str, requests: RequestSchedule, seconds: float) -> list[dict[str, Any]]:
        end = self.journal.clock() + seconds
        rows: list[dict[str, Any]] = []
        for setting in grid(name, self.lab.recipe(name), self.slo):
            if rows and self.journal.clock() > end:
                break
            rows.append(setting.to_dict() | self._simulated(setting, requests))
            if len(rows) % 20 == 0:
                self.progress(f"simulating settings of {name}: {len(rows)}")
        return rows

    def _simulated(self, setting: Setting, requests: RequestSchedule) -> dict[str, Any]:
        try:
            found = self.simulation(setting, requests.requests)
        except UserError as error:
            return {"cost": math.inf, "known": True, "reason": str(error)}
        return {
            "cost": goal.cost(self.slo, found.records),
            "values": goal.describe(self.slo, found.records),
            "known": found.known,
            "load": found.load,
            "seconds": found.seconds,
            "waiting": found.waiting,
            "num_preemptions": found.num_preemptions,
            "reason": "",
        }

    def _racers(self, default: Setting) -> list[Setting]:
        """The default, and the best simulated settings; among equals the settings with fewer changes."""
        ranked = sorted(
            (s for s, row in self.simulated.items() if math.isfinite(row["cost"])),
            key=lambda s: (not self.simulated[s]["known"], self.simulated[s]["cost"]),
        )
        picked: list[Setting] = []
        costs = {s: self.simulated[s]["cost"] for s in ranked}
        for name in dict.fromkeys(s.recipe for s in ranked):
            mine = [s for s in ranked if s.recipe == name]
            least = min(costs[s] for s in mine)
            if least > HOPELESS * min(costs.values()):
                continue
            near = [s for s in mine if costs[s] <= NEAR * least]
            first = min(near, key=lambda s: (len(s.knobs), costs[s]))
            others = [s for s in mine if abs(costs[s] / costs[first] - 1) > DIFFERENT]
            picked += [first, *others][:MOST_OF_ONE]
        picked.sort(key=lambda s: (not self.simulated[s]["known"], self.simulated[s]["cost"]))
        if picked and gains_by_guesses(self.slo):
            picked.insert(1, speculating(picked[0]))
        return list(dict.fromkeys([default, *(s for s in picked if s != default)][: RACERS + 1]))

    def _round_requests(self, racers: int) -> int:
        """Requests of a setting in a round: about ``ROUND_SECONDS``, and few enough for all rounds."""
        low, high = ROUND_REQUESTS
        rate = self.shape.load.rate or 1 / self.request_seconds
        seconds = max(self.left - self.confirm_seconds(), 0.0) * RACE_SHARE / (2 * LEAST_ROUNDS * racers)
        return int(min(max(min(ROUND_SECONDS, seconds) * rate, low), high))

    def _race(self, name: str, racers: Sequence[Setting], reference: Setting) -> dict[Setting, list[float]]:
        """The costs of each racer by round; a dropped racer has fewer rounds. Empty where none could be tried."""
        count = self.journal.trial(f"{name} requests", lambda: self._round_requests(len(racers))).result
        rows: dict[Setting, list[float]] = {setting: [] for setting in racers}
        alive = list(racers)
        with Servers(self.lab, racers) as servers:
            for number in range(MOST_ROUNDS):
                need = len(alive) * self.longest(count)
                if not self.is_time(f"{name} round {number}", need * 0.7 + self.confirm_seconds()):
                    self.outcome.notes.append(f"{name}: {number} rounds, then the time for confirming began")
                    break
                schedule = self.lab.requests(count, self.seed + SEED_RACE + number)
                for setting in alive[:: 1 if number % 2 == 0 else -1]:  # none is always the later one
                    self.progress(f"{name}, round {number + 1}: {setting.key}")
                    trial = self.measured(f"{name} round {number} {setting.key}", servers, setting, schedule)
                    if trial.result is None:
                        self.outcome.notes.append(f"{setting.key}: {trial.reason}")
                        alive.remove(setting)
                        continue
                    rows[setting].append(_number(trial.result["cost"]))
                alive = self._still_racing(rows, alive, reference, number)
                if len(alive) < 2 and number + 1 >= LEAST_ROUNDS:
                    break
        return {setting: costs for setting, costs in rows.items() if costs}

    def measured(self, key: str, servers: Servers, setting: Setting, schedule: RequestSchedule) -> Trial:
        """The trial ``key``: a run of ``setting``, with the cost and the record of each request."""

        def work() -> dict[str, Any]:
            limit = min(self.longest(len(schedule.requests)), max(self.left, TAIL))
            records = servers.run(setting, schedule, limit)
            return {
                "cost": goal.cost(self.slo, records),
                "values": goal.describe(self.slo, records),
                "requests": len(records),
                "failed": [record.error for record in records if not record.ok][:3],
                "records": [record.to_dict() for record in records],
            }

        return self.journal.trial(key, work)

    def _still_racing(
        self, rows: dict[Setting, list[float]], alive: list[Setting], reference: Setting, number: int
    ) -> list[Setting]:
        """``alive`` without the settings slower than the best; the reference stays for comparisons."""
        whole = [s for s in alive if len(rows[s]) == number + 1]
        if number + 1 < LEAST_ROUNDS or len(whole) < 2:
            return whole
        best = min(whole, key=lambda s: _level(rows[s]))
        return [s for s in whole if s in (best, reference) or not paired_ratio(rows[s], rows[best]).is_more]

    def _chosen(self, costs: dict[Setting, list[float]], default: Setting) -> Setting:
        """The best setting, if shown to be better than the default, without options of no effect."""
        best = self._best(costs)
        ratio = self._ratio(costs, best, default)
        if best == default or ratio is None or not ratio.is_less:
            return default if default in costs else best
        if len(best.knobs) + (best.recipe != default.recipe) < 2:
            self.outcome.effects |= {group[0]: ratio for group in best.knobs}
            return best
        variants = {group: best.without(group) for group in best.knobs}
        needed = {group: v for group, v in variants.items() if not self._is_simulated_equal(best, v)}
        kept = best
        for group in variants.keys() - needed.keys():
            kept = kept.without(group)
        if not needed:
            return kept
        if not self.is_time("ablation", self.confirm_seconds() + self.confirm_seconds() / 2):
            self.outcome.notes.append(
                "no time to measure each option alone: all went back to the recipe's value"
            )
            return Setting(best.recipe)
        rows = self._race("ablation", [best, *needed.values()], best)
        for group, variant in needed.items():
            effect = self._ratio(rows, best, variant)
            if effect is not None and effect.is_less:
                self.outcome.effects[group[0]] = effect
            else:
                kept = kept.without(group)
        return kept

    def _is_simulated_equal(self, best: Setting, variant: Setting) -> bool:
        """True if the simulation sees no difference between two settings."""
        rows = [self.simulated.get(setting) for setting in (best, variant)]
        if any(row is None or not row["known"] for row in rows):
            return False
        a, b = (_number(row["cost"]) for row in rows if row is not None)
        return b <= a * (1 + (NEAR - 1) / 2)

    def _unraced(self, racers: Sequence[Setting], default: Setting) -> Setting:
        """The setting to confirm without a race: the default, unless only another setting holds in the simulation."""
        self.outcome.notes.append("no round of a race was finished: only a confirmation can show anything")
        rows = {s: self.simulated[s] for s in racers if s in self.simulated}
        able = [s for s, row in rows.items() if row["known"] and _number(row["cost"]) <= 1]
        return default if default in able or not able else min(able, key=lambda s: _number(rows[s]["cost"]))

    def _best(self, costs: dict[Setting, list[float]]) -> Setting:
        most = max(len(rounds) for rounds in costs.values())
        return min((s for s, rounds in costs.items() if len(rounds) == most), key=lambda s: _level(costs[s]))

    def _ratio(self, costs: dict[Setting, list[float]], over: Setting, under: Setting) -> Ratio | None:
        """Cost of ``over`` over ``under`` in the rounds of both; None without any."""
        count = min(len(costs.get(over, [])), len(costs.get(under, [])))
        return paired_ratio(costs[over][:count], costs[under][:count]) if count else None

    def _runners_up(self, costs: dict[Setting, list[float]], default: Setting) -> list[Setting]:
        """Other settings for a confirmation, the best first: each held the objective in the race."""
        able = [s for s, rounds in costs.items() if _level(rounds) <= 1 and s != default]
        return sorted(able, key=lambda s: _level(costs[s]))

    # -- where nothing holds ------------------------------------------------------------------------------

    def _advise(self, setting: Setting) -> None:
        from optkit.tune.advice import advice

        orders, row = self.outcome.orders, self.simulated.get(setting)
        hopeless = row is not None and _number(row["cost"]) > 1 and not any(one["values"] for one in orders)
        if all(map(_ended_early, orders)) and not hopeless:
            line = "no order of arrival missed the objective: a larger --budget lets the confirmation end"
            self.outcome.advice = [line]
            return
        requests = self.lab.requests(SIMULATED_REQUESTS, self.seed + SEED_SIMULATE)
        found = self.journal.trial(self.of_budget("advice"), lambda: advice(self, setting, requests))
        self.outcome.advice = found.result or [found.reason]


def _ended_early(order: Mapping[str, Any]) -> bool:
    """True for an order of a confirmation that misses nothing but time."""
    return set(order["missing"]) <= {BUDGET_ENDED} and (not order["values"] or _number(order["cost"]) <= 1)


def _level(costs: Sequence[float]) -> float:
    """The geometric mean of the costs of some rounds."""
    if any(math.isinf(cost) for cost in costs):
        return math.inf
    return math.exp(sum(math.log(max(cost, 1e-12)) for cost in costs) / len(costs))


def _number(value: Any) -> float:
    return math.inf if value is None else float(value)
