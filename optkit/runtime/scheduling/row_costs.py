"""The time of steps of few rows, as measured.

``CostModel`` is linear in rows: it has the slope of prompts. The first rows of a step cost more or less than that (a
tile of a kernel is full or not, a shape has a kernel of its own), and guesses are bought one row at a time. So the
seconds of steps without prompts are kept for each number of rows, as a factor on the model's prediction, which follows
contexts and the machine's speed.
"""

from __future__ import annotations

from optkit.runtime.scheduling.cost_model import CostModel, StepWork

MOST_ROWS = 64
WEIGHT = 0.15  # of a new measurement
FORGOTTEN = (
    0.003  # by each step, of what is known about other numbers of rows: what once was slow is tried again
)
LARGEST_CHANGE = (
    1.5  # a measurement further off counts as this much: a frozen process says nothing about rows
)


class RowCosts:
    """Factors on the predictions of ``cost`` by the number of rows of a step."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._factors: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step without prompts: every token has a row of logits."""
        predicted = self.cost.seconds(work)
        if not 0 < work.rows <= MOST_ROWS or work.rows != work.tokens or predicted <= 0 or seconds <= 0:
            return
        before = self._factor(work.rows)
        count = self._counts[work.rows] = self._counts.get(work.rows, 0) + 1
        found = min(max(seconds / predicted, before / LARGEST_CHANGE), before * LARGEST_CHANGE)
        new = before + max(WEIGHT, 1.0 / (count + 1)) * (found - before)
        for rows, factor in self._factors.items():
            self._factors[rows] = factor + FORGOTTEN * (new - factor)
        self._factors[work.rows] = new

    def seconds(self, work: StepWork) -> float:
        """The predicted time of a step without prompts."""
        return self.cost.seconds(work) * self._factor(work.rows)

    def _factor(self, rows: int) -> float:
        """The factor of ``rows``; between measured numbers on a line, beyond them that of the nearest."""
        known = self._factors.get(rows)
        if known is not None:
            return known
        below = max((each for each in self._factors if each < rows), default=None)
        above = min((each for each in self._factors if each > rows), default=None)
        if below is None or above is None:
            nearest = below if above is None else above
            return 1.0 if nearest is None else self._factors[nearest]
        share = (rows - below) / (above - below)
        return self._factors[below] + share * (self._factors[above] - self._factors[below])
