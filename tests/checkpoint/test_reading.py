"""Checks common to the readers of quantized layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optkit.checkpoint.reading import Checked, checked_g_idx, checked_scale, in_order, setting
from optkit.checkpoint.safetensors_header import TensorInfo
from optkit.errors import UserError

HERE = Path("model")
TENSORS = {
    "a.qweight": TensorInfo(HERE, "I32", (4, 8)),
    "b.qweight": TensorInfo(HERE, "I32", (4, 0)),
    "a.scales": TensorInfo(HERE, "F16", (4,)),
}
CHECKED = Checked(HERE, TENSORS, {})


def test_info_accepts_any_size_in_the_place_of_none() -> None:
    assert CHECKED.info("a.qweight", ["I32"], (None, 8)).shape == (4, 8)


@pytest.mark.parametrize(
    ("name", "dtypes", "shape", "message"),
    [
        ("a.qweight", ["I8", "U8"], (4, 8), r"a.qweight is I32 \[4, 8\], its format wants I8 or U8"),
        ("a.qweight", ["I32"], (None, 9), r"wants I32 \['any', 9\]"),
        ("a.qweight", ["I32"], (None,), "a.qweight is I32"),
        ("b.qweight", ["I32"], (4, None), r"b.qweight is I32 \[4, 0\]"),
        ("a.g_idx", ["I32"], (None,), "the tensor a.g_idx is missing"),
    ],
)
def test_info_refuses_in_one_line(
    name: str, dtypes: list[str], shape: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        CHECKED.info(name, dtypes, shape)


def test_modules_are_those_with_the_tensor() -> None:
    assert CHECKED.modules("qweight") == ["a", "b"] and CHECKED.modules("scales") == ["a"]


def test_setting_takes_the_default_for_a_missing_or_null_value() -> None:
    assert setting({}, "bits", (2, 4), 4, "there") == 4
    assert setting({"bits": None}, "bits", (2, 4), 4, "there") == 4
    assert setting({"bits": 2}, "bits", (2, 4), 4, "there") == 2


@pytest.mark.parametrize("value", [3, 4.0, True, "4", [4]])
def test_setting_refuses_other_values_and_other_types(value: object) -> None:
    with pytest.raises(UserError, match=r"'bits' in quantization_config is .*, optkit reads 1, 2, 4"):
        setting({"bits": value}, "bits", (1, 2, 4), 4, "there")


def test_in_order_counts_channels_by_group() -> None:
    assert in_order(7, 3).tolist() == [0, 0, 0, 1, 1, 1, 2] and in_order(3, 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_checked_g_idx_refuses_groups_that_are_not_there(wrong: int) -> None:
    assert checked_g_idx(torch.tensor([0, 3]), 4, "g", "there").dtype == torch.int32
    with pytest.raises(UserError, match="g names groups outside 0 to 3"):
        checked_g_idx(torch.tensor([0, wrong]), 4, "g", "there")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_checked_scale_refuses_numbers_that_are_not_finite(wrong: float) -> None:
    with pytest.raises(UserError, match="s holds values that are not finite"):
        checked_scale(torch.tensor([1.0, wrong]), "s", "there")
