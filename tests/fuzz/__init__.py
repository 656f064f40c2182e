"""A structure-aware fuzzer over artifacts: hashes are right, contents are hostile.

``seeds`` writes small artifacts, ``mutations`` changes one by a number, ``trial`` verifies and serves the result, and
``server`` does so for many numbers in forked processes. A mutant may be refused by a ``UserError``, a failed
verification or a failed request, or it may run. A signal, a sanitizer's report, a hang or any other exception is a
failure.

A failure is printed with its number and what the mutant changed. To see one again, with the traceback or the report:

    python -m tests.fuzz.server --seeds DIR --only NUMBER    # DIR: any folder; seeds are made there if missing
    python -m tests.support.sanitized address -m tests.fuzz.server --seeds DIR --only NUMBER
"""
