"""
Headstart's CPU kernels. Addresses are integers (`Tensor.data_ptr()`), 0 for none; strides count elements.
"""

import enum
from collections.abc import Sequence

def instruction_sets() -> list[str]:
    """What this machine runs, best first."""

class Runtime:
    """Compute threads and their kernels. One call at a time."""

    def __init__(self, num_threads: int, cpus: Sequence[int] = [], instruction_set: str = "") -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

class Mix(enum.Enum):
    """
    The multiplications that linear layers are made of, with what sums them.
    """

    FLOAT32 = 0

    INT8 = 1

    INT4 = 2

def multiply_most(runtime: Runtime, mix: Mix, items: int, rounds: int) -> float:
    """
    Multiply in registers, as fast as the instruction set can. Returns how many multiplications it did.
    """

def read_most(runtime: Runtime, data: int, slice_bytes: int, num_slices: int, repeats: int, streams: int) -> None:
    """
    Read slices of memory, each several times by one thread, and do nothing else.
    """

class Placement(enum.Enum):
    """Where rows go: one after the other, or gate and up panels in turns."""

    PLAIN = 0

    GATE = 1

    UP = 2

class Format(enum.Enum):
    FLOAT32 = 0

    BFLOAT16 = 1

    FP8 = 2

    Q8_0 = 3

    Q4_0 = 4

    Q4_1 = 5

class PackedWeight:
    """A matrix [num_outputs, num_inputs] as the kernels read it."""

    def __init__(self, format: Format, num_outputs: int, num_inputs: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def pack_floats(
        self, runtime: Runtime, rows: int, num_rows: int, first_output: int, placement: Placement
    ) -> None: ...
    def pack_bfloats(
        self, runtime: Runtime, rows: int, num_rows: int, first_output: int, placement: Placement
    ) -> None: ...
    def pack_fp8(
        self, runtime: Runtime, codes: int, scales: int, num_rows: int, first_output: int, placement: Placement
    ) -> None: ...
    def pack_groups(
        self,
        runtime: Runtime,
        codes: int,
        scales: int,
        minimums: int,
        num_rows: int,
        first_output: int,
        placement: Placement,
    ) -> None: ...
    def unpack(self, runtime: Runtime, rows: int, count: int, out: int) -> None: ...

class LinearLayer:
    """out (+)= weight * norm(x) + bias"""

    def __init__(self, weight: PackedWeight, bias: int, norm: int, eps: float) -> None: ...
    def run(self, arg0: Runtime, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: bool, /) -> None: ...

class GatedMlpLayer:
    """out (+)= down(silu(gate(norm(x))) * up(norm(x)))"""

    def __init__(
        self,
        gate_up: PackedWeight,
        gate_bias: int,
        up_bias: int,
        down: PackedWeight,
        down_bias: int,
        norm: int,
        eps: float,
    ) -> None: ...
    def run(self, arg0: Runtime, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: bool, /) -> None: ...

class KvFormat(enum.Enum):
    FLOAT32 = 0

    FLOAT16 = 1

    BFLOAT16 = 2

    INT8 = 3

    FP8 = 4

class AttentionShape:
    """The attention layers of a model over one kind of KV pool."""

    def __init__(self, format: KvFormat, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None: ...
    @property
    def padded_dim(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""

class QkNorm:
    """RMS norms of each query and key head."""

    def __init__(self, query: int, key: int, head_dim: int, eps: float) -> None: ...

class AttentionStep:
    """Where a step's rows go and what they see."""

    def __init__(
        self,
        shape: AttentionShape,
        num_rows: int,
        spans: int,
        num_spans: int,
        cos: int,
        sin: int,
        slots: int,
        query_scale: float,
        queries: int,
    ) -> None: ...
    def rotate_and_write(
        self, runtime: Runtime, layer: int, qkv: int, qkv_stride: int, rotate: bool, norm: QkNorm | None
    ) -> None: ...
    def attend(self, runtime: Runtime, layer: int, out: int, out_stride: int) -> None: ...
