from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.text.chat_template import ChatTemplate, TemplateFailure

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(MESSAGES, **variables)


ESCAPES = [
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ joiner.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ dict.__globals__ }}",
    "{{ range.__class__.__base__.__subclasses__() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ (messages|attr('__class__')).__base__ }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('mro')() }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'|format(''.__class__.__mro__) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.__mro__ }}",
    "{{ namespace(__init__=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ config.items() }}",
    "{{ [].append.__self__.__class__.__mro__ }}",
    "{{ 'a' * 10**9 }}",
    "{{ 9 ** 99999 ** 2 }}",
    "{{ [0] * 99999999999 }}",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TemplateFailure) as caught:
        render(source)
    assert "0x" not in str(caught.value) and "/" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_published_templates_use_works() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}"
        "{{ ns.n }}{{ messages | tojson }}{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}{% generation %}x{% endgeneration %}{{ strftime_now('%%') }}{{ tools is none }}{{ '-' * 3 }}"
    )
    assert render(source) == '1[{"role": "user", "content": "Hi"}]01x%True---'


def test_tojson_is_plain_json() -> None:
    assert render("{{ '<é>' | tojson }}") == '"<é>"'


def test_variables_and_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mode }}", {"bos_token": "<s>"})
    assert template.render(MESSAGES, mode="fast") == "<s>fast"


def test_a_template_s_own_refusal_is_told() -> None:
    with pytest.raises(TemplateFailure, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_broken_template_does_not_compile() -> None:
    with pytest.raises(UserError, match="does not compile"):
        render("{% for %}")
