"""What the setting `quantization` comes to, for each kind of checkpoint and machine."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

import pytest

from headstart.config import ConfigError, Device, Quantization
from headstart.ops.formats import WeightFormat
from headstart.quant.method import METHODS
from headstart.quant.settle import settle_quantization

F = WeightFormat
NATIVE = (F.FLOAT32, F.BFLOAT16, F.Q8_0, F.Q4_0, F.Q4_1)
EVERYTHING = tuple(WeightFormat)


@pytest.mark.parametrize(
    ("choice", "checkpoint", "device", "computable", "keep", "method"),
    [
        ("auto", (), "cpu", NATIVE, (), "int8"),
        ("auto", (), "cpu", (), (), None),
        ("auto", (), "cuda", EVERYTHING, (), None),
        ("auto", (F.Q4_1, F.Q8_0), "cpu", NATIVE, (F.Q4_1, F.Q8_0), None),
        ("auto", (F.Q4_1,), "cuda", (), (), None),
        ("auto", (F.FP8,), "cpu", NATIVE, (), None),
        ("auto", (F.FP8,), "cpu", EVERYTHING, (F.FP8,), None),
        ("auto", (F.FP8, F.Q8_0), "cpu", NATIVE, (F.Q8_0,), None),
        ("none", (), "cpu", NATIVE, (), None),
        ("none", (F.Q4_0,), "cpu", NATIVE, (), None),
        ("int8", (), "cpu", NATIVE, (), "int8"),
        ("int4", (), "cpu", NATIVE, (), "int4"),
        ("fp8", (), "cpu", EVERYTHING, (), "fp8"),
        ("int8", (), "cuda", EVERYTHING, (), "int8"),
        ("int8", (F.FP8,), "cpu", NATIVE, (), "int8"),
    ],
)
def test_what_is_settled(
    choice: Quantization,
    checkpoint: Collection[WeightFormat],
    device: Device,
    computable: Collection[WeightFormat],
    keep: Collection[WeightFormat],
    method: str | None,
) -> None:
    settled = settle_quantization(choice, checkpoint, device, computable)
    assert settled.keep == set(keep)
    assert settled.method is (METHODS[method] if method else None)


def test_every_choice_is_a_method_or_a_word() -> None:
    assert set(get_args(Quantization)) == {"auto", "none", *METHODS}


@pytest.mark.parametrize("choice", sorted(METHODS))
def test_what_cannot_be_computed_with_is_refused_with_what_can(choice: Quantization) -> None:
    with pytest.raises(ConfigError, match=rf"^quantization {choice} cannot be .* on cuda here: use auto, none$"):
        settle_quantization(choice, (), "cuda", ())
    rest = [method.format for name, method in METHODS.items() if name != choice]
    with pytest.raises(ConfigError, match="use auto, none, ") as caught:
        settle_quantization(choice, (), "cpu", rest)
    assert all((name in str(caught.value).split("use ")[1]) is (name != choice) for name in METHODS)


@pytest.mark.parametrize("choice", sorted(METHODS))
def test_what_is_quantized_already_is_not_rounded_again(choice: Quantization) -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(q4_1, q8_0\): auto keeps it so, none makes it floats"):
        settle_quantization(choice, (F.Q8_0, F.Q4_1), "cpu", NATIVE)
