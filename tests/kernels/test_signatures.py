"""signatures.h against the C++ definitions, the library that was built, and the ctypes prototypes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from optkit.kernels.cpu import native, signatures

FOLDER = Path(native.__file__).parent
DEFINITION = re.compile(r"^OPTKIT_API (.+?) ?optkit_(\w+)\(([^)]*)\) \{", re.MULTILINE)
needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def definitions() -> dict[str, tuple[str, str]]:
    """Result and parameters of each exported function, from the C++ sources, by name."""
    found = {}
    for file in FOLDER.glob("*.cpp"):
        for result, name, parameters in DEFINITION.findall(file.read_text()):
            found[name] = (result, " ".join(parameters.split()))
    return found


def test_every_definition_has_the_parameters_that_are_listed() -> None:
    defined = definitions()
    defined.pop("signature")  # it gives the list
    assert set(defined) == set(signatures.signatures())
    for entry in signatures.listed():
        result, name, parameters = signatures.inside(entry).split(", ", 2) + [""] * (entry.count(", ") < 2)
        given = re.sub(r"\bint\b(?= *$)", "int threads", defined[name][1])  # an unused parameter has no name
        wanted = "" if parameters == "void" else parameters
        wanted += ", int threads" if entry.startswith("KERNEL") else ""
        assert (defined[name][0], given) == (result, wanted), name


@needs_native
def test_library_was_compiled_with_the_functions_that_are_listed() -> None:
    assert tuple(native.compiled_signatures(native.library())) == signatures.listed()


@needs_native
@pytest.mark.parametrize("change", ["other parameter", "more", "less"])
def test_library_with_other_functions_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, name = list(signatures.listed()), "attention"
    if change == "other parameter":
        listed[-1] = listed[-1].replace("float scale, float softcap", "float softcap, float scale")
    elif change == "more":
        listed.append("KERNEL(void, new_kernel, const float* x)")
        name = "new_kernel"
    else:
        listed.pop()
    monkeypatch.setattr(signatures, "listed", lambda: tuple(listed))
    with pytest.raises(OSError, match=rf"_native.so is older than its sources \({name} is another function"):
        native.check_signatures(native.library(), "_native.so")


def test_library_that_lists_no_functions_is_refused() -> None:
    with pytest.raises(OSError, match="older than its sources"):
        native.check_signatures(ctypes.CDLL(None), "_native.so")


def test_signatures_have_types_for_ctypes_and_kernels_count_from_zero() -> None:
    found = signatures.signatures()
    pointer, long, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    assert found["w8_bytes"].prototype == (long, (long, long, long))
    assert found["isa"].prototype == (whole, ())
    assert found["rope_table"].prototype == (None, (*[pointer] * 4, long, long, ctypes.c_float, whole))
    numbers = [signature.number for signature in found.values() if signature.number is not None]
    assert numbers == list(range(len(numbers)))


def test_only_parameters_with_a_stride_may_have_rows_of_any_distance() -> None:
    strided = {p.name for p in signatures.kernel("linear_w8a8").parameters if p.strided}
    assert strided == {"q"}
    assert {p.name for p in signatures.kernel("attention").parameters if p.strided} == {"q", "k", "v"}


def test_every_pointer_of_a_kernel_has_dtypes() -> None:
    for signature in signatures.signatures().values():
        if signature.number is not None:
            pointers = [p.kind for p in signature.parameters if p.is_pointer]
            assert set(pointers) <= set(signatures.DTYPES), signature.name
