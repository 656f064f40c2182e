"""Service level objectives as text, read by one parser for every command.

::

    ttft_p95<700ms@4rps          a percentile, a bound with its unit, the load
    ttft:700,tpot:50             vLLM's form: milliseconds, at p95
    95%:ttft<700ms,tpot<50ms     at least 95 % of the requests within all bounds at once
    ttft_p50 <= 0.5x baseline    relative to another side of a comparison; 0.5x alone means the only other side
    throughput >= 100@8clients   output tokens a second, with 8 clients without pauses

``throughput`` is ``output_throughput`` and ``e2el`` is ``e2e``, as in vLLM. A latency without a statistic
means p95, and a latency without a unit is in milliseconds. Terms are separated by commas or spaces.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from optkit.errors import UserError, nearest

LATENCIES = ("ttft", "tpot", "itl", "e2e")
RATES = ("output_throughput", "request_throughput")
ALIASES = {"throughput": "output_throughput", "e2el": "e2e"}
METRICS = (*LATENCIES, *RATES)
MILLISECONDS = {"ms": 1.0, "s": 1e3, "us": 1e-3}
DEFAULT_STATISTIC = "p95"
MOST_CHARACTERS = 1000
OPERATORS = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "≤": "<=", "≥": ">=", ":": "<="}
EXAMPLE = "write ttft_p95<700ms@4rps, ttft:700,tpot:50 or 95%:ttft<700ms,tpot<50ms"

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
SHARE = re.compile(rf"\s*({NUMBER})\s*%\s*:", re.ASCII)
LOAD = re.compile(rf"({NUMBER})\s*(rps|req/s|clients?)", re.ASCII)
TERM = re.compile(
    rf"(?P<name>[A-Za-z0-9_.]+)\s*(?P<op><=|>=|[<>≤≥:])\s*(?P<number>{NUMBER})"
    r"(?:\s*(?P<times>x)(?:\s+(?P<side>[A-Za-z][\w./-]*)(?![\w./-]|\s*[<>≤≥:]))?|\s*(?P<unit>ms|us|s|tok/s|req/s)(?=[\s,]|$))?",
    re.ASCII,
)
STATISTIC = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True)
class Load:
    """The load that an objective is promised at: requests a second (Poisson), or clients without pauses."""

    rate: float | None = None
    clients: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}rps" if self.rate is not None else f"{self.clients}clients"


@dataclass(frozen=True)
class Term:
    """A bound on one metric.

    Attributes:
        metric: one of ``METRICS``.
        statistic: ``p95`` and the like, ``mean``, or empty for a rate of the whole run.
        operator: ``<``, ``<=``, ``>`` or ``>=``.
        value: milliseconds for a latency, a number per second for a rate, a factor where ``side`` is given.
        side: the other side of a comparison, of which ``value`` is a multiple; empty for the only other side, None
            for a bound by itself.
    """

    metric: str
    statistic: str
    operator: str
    value: float
    side: str | None = None

    @property
    def is_upper(self) -> bool:
        """True where smaller is better."""
        return self.operator.startswith("<")

    @property
    def percentile(self) -> float | None:
        """95 of ``p95``; None for a mean and for a rate."""
        found = STATISTIC.fullmatch(self.statistic)
        return float(found[1]) if found else None

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}" if self.statistic else self.metric

    def bound(self, other: float | None = None) -> float:
        """The bound itself; ``other`` is the value of ``side``."""
        if self.side is None:
            return self.value
        if other is None:
            raise ValueError(f"{self} needs the value of {self.side}")
        return self.value * other

    def met(self, value: float, other: float | None = None) -> bool:
        """True if ``value`` is within the bound. NaN never is."""
        bound = self.bound(other)
        within = {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}
        return within[self.operator]

    def __str__(self) -> str:
        unit = "ms" if self.metric in LATENCIES else ""
        if self.side is not None:
            unit = f"x {self.side}".rstrip()
        return f"{self.name}{self.operator}{self.value:g}{unit}"


@dataclass(frozen=True)
class Slo:
    """An objective: bounds which all hold, at a load.

    ``share``: the least share of requests within all terms at once, 0.95 for ``95%:``. None where each term has its own
    statistic.
    """

    terms: tuple[Term, ...]
    share: float | None = None
    load: Load | None = None

    def __str__(self) -> str:
        if self.share is None:
            terms = ",".join(map(str, self.terms))
        else:
            bounds = (f"{term.metric}{term.operator}{term.value:g}ms" for term in self.terms)
            terms = f"{100 * self.share:g}%:" + ",".join(bounds)
        return terms + (f"@{self.load}" if self.load else "")


def parse_slo(text: str, where: str = "--slo") -> Slo:
    """The objective that ``text`` says.

    Args:
        where: the place of the text, for errors.

    Raises:
        UserError: text in another form, an unknown metric, or a number out of its range.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{len(text)} characters, of at most {MOST_CHARACTERS}", where=where, fix=EXAMPLE)
    body, at, load = text.partition("@")
    share = None
    if found := SHARE.match(body):
        share, body = _share(found[1], text, where), body[found.end() :]
    terms = tuple(_terms(body, share, text, where))
    if not terms:
        raise UserError("no bound in it", where=_place(where, text), fix=EXAMPLE)
    if len({(term.metric, term.statistic, term.is_upper) for term in terms}) < len(terms):
        raise UserError("the same metric twice", where=_place(where, text), fix="keep one of the bounds")
    return Slo(terms, share, _load(load, text, where) if at else None)


def _terms(body: str, share: float | None, text: str, where: str) -> list[Term]:
    terms, at = [], 0
    while at < len(body):
        if body[at] in ", \t\n":
            at += 1
            continue
        found = TERM.match(body, at)
        if not found:
            raise _not_a_term(body[at:], text, where)
        terms.append(_term(found, share, text, where))
        at = found.end()
        if at < len(body) and body[at] not in ", \t\n":
            raise UserError(
                f"'{body[at : at + 20]}' after a bound is no unit", where=_place(where, text), fix=EXAMPLE
            )
    return terms


def _not_a_term(rest: str, text: str, where: str) -> UserError:
    name = re.match(r"[A-Za-z0-9_.]*", rest)
    if name and name[0] and rest[name.end() :].strip()[:1] in ("<", ">", ":", "≤", "≥"):
        _metric(name[0], text, where)
        return UserError("no number after the sign", where=_place(where, text), fix=EXAMPLE)
    return UserError(f"'{rest[:40]}' is no bound", where=_place(where, text), fix=EXAMPLE)


def _metric(name: str, text: str, where: str) -> tuple[str, str]:
    """Metric and statistic of ``ttft_p95``; an empty statistic where the name has none."""
    if name in METRICS or name in ALIASES:
        return ALIASES.get(name, name), ""
    metric, _, statistic = name.rpartition("_")
    metric = ALIASES.get(metric, metric)
    found = STATISTIC.fullmatch(statistic)
    if metric in LATENCIES and (statistic == "mean" or (found and float(found[1]) > 0)):
        return metric, statistic
    if metric in METRICS:
        fix = "a latency takes p50, p95, p99 or mean; a rate takes nothing"
        raise UserError(f"'{statistic}' is no statistic of {metric}", where=_place(where, text), fix=fix)
    fix = nearest(name, (*METRICS, *ALIASES))
    raise UserError(f"unknown metric: {name}", where=_place(where, text), fix=fix)


def _term(found: re.Match[str], share: float | None, text: str, where: str) -> Term:
    metric, statistic = _metric(found["name"], text, where)
    operator = OPERATORS[found["op"]]
    value, unit = float(found["number"]), found["unit"]
    side = (found["side"] or "") if found["times"] else None
    place = _place(where, text)
    if not 0 < value < math.inf:
        raise UserError(f"not a positive number: {found['number']}", where=place, fix=EXAMPLE)
    if metric in RATES:
        if found["op"] == ":":
            raise UserError(f"{metric} needs >= or <=", where=place, fix=f"write {metric}>={found['number']}")
        if unit in MILLISECONDS:
            raise UserError(f"{metric} is a rate, '{unit}' is a time", where=place, fix="leave the unit out")
    elif unit not in (None, *MILLISECONDS):
        raise UserError(f"{metric} is a time, '{unit}' is a rate", where=place, fix="use ms or s")
    if share is not None and (metric in RATES or statistic or found["times"] or not operator.startswith("<")):
        fix = "write 95%:ttft<700ms,tpot<50ms"
        raise UserError("a share of requests takes plain upper bounds on latencies", where=place, fix=fix)
    if metric in LATENCIES and side is None:
        value *= MILLISECONDS[unit or "ms"]
    if metric in LATENCIES and share is None:
        statistic = statistic or DEFAULT_STATISTIC
    return Term(metric, statistic, operator, value, side)


def _share(number: str, text: str, where: str) -> float:
    value = float(number)
    if not 0 < value <= 100:
        raise UserError(f"{number} % is no share of the requests", where=_place(where, text), fix=EXAMPLE)
    return value / 100


def _load(load: str, text: str, where: str) -> Load:
    found = LOAD.fullmatch(load.strip())
    fix = "write @4rps for requests a second, or @8clients for clients without pauses"
    if not found or not 0 < float(found[1]) < math.inf:
        raise UserError(f"'{load.strip()[:40]}' is no load", where=_place(where, text), fix=fix)
    if not found[2].startswith("client"):
        return Load(rate=float(found[1]))
    if not found[1].isdigit():
        raise UserError(f"{found[1]} is no number of clients", where=_place(where, text), fix=fix)
    return Load(clients=int(found[1]))


def _place(where: str, text: str) -> str:
    return f"{where} {text[:80]}".strip()
