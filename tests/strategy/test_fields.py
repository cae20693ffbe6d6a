"""The table of settings, and the conversion of values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from fleetrun.strategy import fields

if TYPE_CHECKING:
    from fleetrun.strategy.fields import Field

EVERY = [part for field in fields.TABLE for part in (field, *field.keys)]


def field(name: str, section: str = "strategy") -> Field:
    return fields.find(section, name)


@pytest.mark.parametrize("field", EVERY, ids=lambda value: value.name)
def test_a_row_is_whole(field: Field) -> None:
    assert field.section in fields.FIELD_SECTIONS
    assert field.doc.endswith(".")
    assert (field.kind == "configs") == bool(field.keys)
    assert (field.kind == "choice") == bool(field.words)
    if field.kind != "configs" and field.default != ():
        assert fields.convert(field, field.default) == field.default


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("fuse_grad_size_in_MB", 16.0, 16),
        ("fuse_grad_size_in_MB", "16", 16),
        ("fuse_grad_size_in_MB", "auto", "auto"),
        ("fuse_grad_size_in_TFLOPS", 50, 50.0),
        ("gradient_merge", 1, True),
        ("dgc_configs.sparsity", [0.9, 1], (0.9, 1.0)),
        ("amp_configs.custom_black_list", "relu", ("relu",)),
        ("gradient_scale_configs.scale_strategy", "sum", "sum"),
    ],
)
def test_what_is_exact_is_converted(name: str, value: object, meant: object) -> None:
    converted = fields.convert(field(name), value)
    assert converted == meant
    assert type(converted) is type(meant)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("fuse_grad_size_in_MB", 16.5, "give a whole number of MB from 1 to 65536, or auto"),
        ("fuse_grad_size_in_MB", True, "give a whole number of MB from 1 to 65536, or auto"),
        ("fuse_grad_size_in_num", "auto", "give a whole number of gradients, 1 or more"),
        ("fuse_grad_size_in_num", 2**31, "give a whole number of gradients, 1 or more"),
        ("last_comm_group_size_MB", math.nan, "give a number of MB, 0 or more"),
        ("gradient_merge", 2, "give true or false"),
        ("gradient_scale_configs.scale_strategy", "mean", "give one of avg, sum, customized"),
        ("dgc_configs.sparsity", ["x"], "give a list of numbers"),
        ("recompute_configs.checkpoint_shape", [1.5], "give a list of whole numbers"),
        ("amp_configs", 1, "give a mapping with init_loss_scaling"),
    ],
)
def test_what_is_not_is_told_what_is_allowed(name: str, value: object, wanted: str) -> None:
    with pytest.raises(ValueError, match="give") as error:
        fields.convert(field(name), value)
    assert str(error.value).startswith(wanted)
