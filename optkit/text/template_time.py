"""The date and the time in the prompts of a chat template (``strftime_now``), for all that keeps prompts or answers."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from optkit.text.chat_template import ChatTemplate

NOW = "strftime_now"


def time_formats(template: ChatTemplate) -> tuple[str, ...] | None:
    """The patterns that ``template`` may give to ``strftime_now``.

    The same messages give the same prompt as long as all patterns give the same texts. None: a pattern is computed, or
    the template draws random numbers, so nothing is known.
    """
    if "random" in template.source:  # a filter of Jinja
        return None
    if NOW not in template.source:
        return ()
    tree = template.tree()
    num_uses = sum(name.name == NOW for name in tree.find_all(nodes.Name))
    formats = list(_formats(tree))
    num_tests = sum(test.name == "defined" and _is_now(test.node) for test in tree.find_all(nodes.Test))
    return tuple(sorted(set(formats))) if num_uses == len(formats) + num_tests else None


def _formats(tree: nodes.Template) -> Iterator[str]:
    """The constant patterns."""
    for call in tree.find_all(nodes.Call):
        if not _is_now(call.node) or call.kwargs or call.dyn_args or call.dyn_kwargs or len(call.args) != 1:
            continue
        pattern = call.args[0]
        if isinstance(pattern, nodes.Const) and isinstance(pattern.value, str):
            yield pattern.value


def _is_now(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == NOW
