"""``extends``: a recipe as the changes to another recipe.

Sections are merged key by key, and so are the options of a pass that both recipes have; lists and single values are
replaced. ``name`` and ``description`` are not inherited. Passes of the base keep their order. A pass that the base
lacks comes after the pass written in front, and before the next written pass of the base; without neighbours at the
end. ``false`` in the place of options leaves a pass of the base out. A place with ``one_of`` on either side is replaced
as a whole.
"""

from __future__ import annotations

import copy
from typing import Any

from optkit.errors import UserError, nearest
from optkit.recipe.strict_yaml import Document, KeyPath

EXTENDS, PASSES, ONE_OF = "extends", "passes", "one_of"
OWN = ("schema_version", "name", "description")  # keys that are not inherited
OWN_PATHS = {(key,) for key in OWN}
LEFT_OUT = False  # in the place of a pass's options


def merged(base: Document, own: Document) -> Document:
    """``own`` over ``base``; both hold mappings, and errors name the file and line of either.

    Raises:
        UserError: a pass is left out that ``base`` does not have.
    """
    inherited = {key: value for key, value in base.data.items() if key not in OWN}
    changes = {key: value for key, value in own.data.items() if key != EXTENDS}
    result = Document(own.label, bases=(base.label, *base.bases))
    result.places = {path: place for path, place in base.places.items() if path[:1] not in OWN_PATHS}
    theirs, ours = inherited.get(PASSES), changes.get(PASSES)
    result.data = _merged_mapping(inherited, changes, (), result)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        result.data[PASSES] = _merged_passes(theirs, ours, result, own)
    result.places |= {path: place for path, place in own.places.items() if path[:1] != (EXTENDS,)}
    return result


def _merged_mapping(
    base: dict[str, Any], own: dict[str, Any], path: KeyPath, result: Document
) -> dict[str, Any]:
    """``own`` over ``base`` at ``path``: mappings are merged, anything else is replaced, except ``passes``."""
    found = copy.deepcopy(base)
    for key, value in own.items():
        if isinstance(found.get(key), dict) and isinstance(value, dict):
            if (*path, key) != (PASSES,):
                found[key] = _merged_mapping(found[key], value, (*path, key), result)
        else:
            _forget(result, (*path, key))
            found[key] = copy.deepcopy(value)
    return found


def _forget(document: Document, path: KeyPath) -> None:
    """Remove the places of a replaced value."""
    document.places = {p: place for p, place in document.places.items() if p[: len(path)] != path}


def _merged_passes(
    base: dict[str, Any], own: dict[str, Any], result: Document, source: Document
) -> dict[str, Any]:
    """The passes of both recipes, in order."""
    names = _order(list(base), list(own))
    found: dict[str, Any] = {}
    for name in names:
        body = own.get(name, {})
        if body is LEFT_OUT:
            if name not in base:
                where, fix = source.where((PASSES, name)), nearest(name, base)
                raise UserError(f"'{name}' is no pass of {result.bases[0]}", where=where, fix=fix)
        elif name not in base or (name in own and (_is_choice(body) or _is_choice(base[name]))):
            _forget(result, (PASSES, name))
            found[name] = copy.deepcopy(body)
        else:
            found[name] = _merged_options(base[name], body, name, result)
    return found


def _is_choice(body: Any) -> bool:
    return isinstance(body, dict) and ONE_OF in body


def _merged_options(base: Any, own: Any, name: str, result: Document) -> Any:
    """The options of a pass of both recipes; None is a pass without options."""
    if not isinstance(base or {}, dict) or not isinstance(own or {}, dict):
        return copy.deepcopy(own)  # refused with the line by the schema
    return _merged_mapping(base or {}, own or {}, (PASSES, name), result)


def _order(base: list[str], own: list[str]) -> list[str]:
    """The names of ``base`` in order, with the new names of ``own`` beside their neighbours there."""
    names = list(base)
    for index, name in enumerate(own):
        if name in names:
            continue
        following = next((other for other in own[index + 1 :] if other in base), None)
        place = names.index(own[index - 1]) + 1 if index else len(names)
        names.insert(place if following is None else min(place, names.index(following)), name)
    return names
