"""The path behind a proxy reaches the application, without a word from the framework."""

from __future__ import annotations

import pytest

from tests.support.serve_fakes import call, tiny_app


def test_root_path_needs_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert call(tiny_app(root_path="/llm"), "GET", "/llm/health").status_code == 200
    assert not [one for one in recwarn if "root_path" in str(one.message)]
