"""YAML with line numbers, restricted to plain data.

Recipes are written by hand, so an error has to name the line. ``yaml.safe_load`` drops the positions. Here the
document is first composed to nodes, the line of every key is noted, and then the nodes become dicts, lists and
scalars.

The dialect is smaller than YAML 1.1 on purpose: no tags (nothing can name a type), no anchors, aliases or merge keys
(a file reads top to bottom, and no small file expands into a huge one), no duplicate keys (the last value would win
silently), no dates (``2026-01-01`` is a string), and ``1e-3`` is a number, as in YAML 1.2. ``dump`` writes the same
dialect, so ``parse`` reads equal data back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from optkit.errors import UserError

KeyPath = tuple[str | int, ...]

MAX_CHARS = 1 << 20
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)
_RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {
    first: [(tag, pattern) for tag, pattern in rules if tag != _TIMESTAMP]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _first in "-+.0123456789":
    _RESOLVERS[_first] = [*_RESOLVERS.get(_first, []), ("tag:yaml.org,2002:float", _FLOAT)]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, refusing anchors, aliases and explicit tags."""
        event = self.peek_event()
        anchored = isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None
        if anchored or getattr(event, "tag", None) is not None:
            problem = f"{'anchors and aliases' if anchored else 'tags'} are not allowed"
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Quote and escape the Unicode line breaks, which a plain scalar would fold into a space."""
        style = '"' if set("\x85\u2028\u2029") & set(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass(eq=False)
class Document:
    """Parsed data with the place of each key.

    Attributes:
        label: file name or argument, the source of the text.
        data: dicts, lists and scalars.
        places: path of a key or list item -> ``file:line``; of several files where a recipe extends another.
        bases: labels of the extended recipes, the nearest first.
        overridden: paths set on the command line -> name of the argument, for error messages.
    """

    label: str = "recipe"
    data: Any = None
    places: dict[KeyPath, str] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Return True for any Document: two recipes with the same keys are equal, wherever the recipes were written."""
        return isinstance(other, Document)

    __hash__ = None  # type: ignore[assignment]

    def where(self, path: Sequence[str | int]) -> str:
        """``file:line`` of ``path`` or of the nearest written parent."""
        for length in range(len(path), -1, -1):
            prefix = tuple(path[:length])
            if prefix in self.overridden:
                return self.overridden[prefix]
            if prefix in self.places:
                return self.places[prefix]
        return self.label


def parse(text: str, label: str) -> Document:
    """Read a YAML document.

    Raises:
        UserError: not YAML, or more than the plain dialect; names the line.
    """
    if len(text) > MAX_CHARS:
        raise UserError(f"longer than {MAX_CHARS} characters", where=label)
    document = Document(label)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            document.places.update((path, f"{label}:{line}") for path, line in _lines(node, (), label))
            document.data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"not valid YAML here: {error.problem}", where=label + line) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}", where=label) from error
    except RecursionError as error:
        raise UserError("nested too deeply", where=label) from error
    return document


def dump(data: Any) -> str:
    """YAML text in the order of ``data``, short lists on one line."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    return text


def _lines(node: yaml.Node, path: KeyPath, label: str) -> Iterator[tuple[KeyPath, int]]:
    """The line of every key and list item under ``node``; refuses odd and duplicate keys."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), label)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            _check_key(key, seen, f"{label}:{line}")
            seen[key.value] = line
            yield (*path, key.value), line
            yield from _lines(value, (*path, key.value), label)


def _check_key(key: yaml.Node, seen: dict[str, int], where: str) -> None:
    if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
        shown = getattr(key, "value", "")
        raise UserError(f"a key must be a plain word, got {shown!r:.60}", where=where)
    if not key.value.isprintable() or not 0 < len(key.value) <= 128:
        raise UserError(f"not a key: {key.value!r:.60}", where=where)
    if key.value in seen:
        raise UserError(f"the key '{key.value}' is already set on line {seen[key.value]}", where=where)
