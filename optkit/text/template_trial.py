"""A chat template's first run, in a process with limits.

A sandbox does not stop a program from looping or allocating. A Python thread cannot be killed, but a process can. So
the server and the calibration let a child process compile and render the template, with limited CPU time and memory,
and refuse a template that fails there. The child also finds the template's traits (``optkit.text.template_traits``).
"""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
from jinja2.sandbox import SecurityError

from optkit.errors import UserError
from optkit.text.chat_template import ChatTemplate, TemplateFailure
from optkit.text.template_traits import TemplateTraits, find_traits

CPU_SECONDS = 2
MEMORY_BYTES = 1024**3
REFUSED, FAILED, BROKEN = 3, 4, 5  # exit codes of the child
MESSAGES = [{"role": "user", "content": "Hello"}]


def check_template(template: ChatTemplate, timeout_s: float = 20.0) -> TemplateTraits:
    """Compile and render ``template`` in a child process with 2 s of CPU time and 1 GiB of memory.

    A template that only refuses the trial messages passes: the server then answers requests with 400.

    Returns:
        The traits of the template.

    Raises:
        UserError: the template does not compile, runs too long, takes too much memory or tries to leave the sandbox.
    """
    command = [sys.executable, "-m", "optkit.text.template_trial"]
    work = json.dumps({"source": template.source, "special_tokens": template.special_tokens})
    try:
        done = subprocess.run(
            command, input=work.encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused("does not finish") from None
    if done.returncode == REFUSED:
        raise _refused("tries to leave its sandbox")
    if done.returncode == BROKEN:
        raise _refused("does not compile")
    if done.returncode not in (0, FAILED):
        raise _refused("takes too much time or memory")
    return msgspec.json.decode(done.stdout, type=TemplateTraits)


def _refused(what: str) -> UserError:
    fix = "use a model whose template you trust, or remove chat_template.jinja and serve completions only"
    return UserError(f"the chat template {what}", where="chat_template", fix=fix)


def _trial() -> int:
    """The work of the child: set the limits, then render the template on standard input. Returns the exit code."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work = json.load(sys.stdin)
    template, status = ChatTemplate(work["source"], work["special_tokens"]), 0
    try:
        template.render(MESSAGES)
    except TemplateFailure as failure:
        if isinstance(failure.__cause__, SecurityError):
            return REFUSED
        status = FAILED
    except UserError:
        return BROKEN
    sys.stdout.write(msgspec.json.encode(find_traits(template)).decode())
    return status


if __name__ == "__main__":
    sys.exit(_trial())
