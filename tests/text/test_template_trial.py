from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.text.chat_template import ChatTemplate
from optkit.text.template_trial import check_template


def test_broken_template_is_refused_at_load() -> None:
    with pytest.raises(UserError, match="does not compile"):
        check_template(ChatTemplate("{% for %}"))


def test_trial_passes_honest_templates() -> None:
    check_template(ChatTemplate("{{ messages[0]['content'] }}"))
    check_template(ChatTemplate("{{ raise_exception('needs a system message') }}"))


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [LOOP, "{{ '%4000000000d' | format(1) }}", "{{ ''.__class__.__mro__ }}"],
    ids=["loop", "memory", "escape"],
)
def test_trial_refuses_hostile_templates(source: str) -> None:
    with pytest.raises(UserError, match="the chat template"):
        check_template(ChatTemplate(source))


def test_trial_returns_the_traits_of_the_template() -> None:
    traits = check_template(ChatTemplate("{{ messages[0]['content'] }}{{ tools | tojson }}"))
    assert traits.takes_tools and traits.takes_system and not traits.thinks
