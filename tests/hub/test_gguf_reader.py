"""The GGUF reader against files that the `gguf` package wrote and reads, and against damage of every kind."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.hub import ModelError, gguf_reader
from headstart.hub.gguf_reader import TENSOR_TYPES
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.stories import shared_data

METADATA = {
    "a.flag": True,
    "a.count": 7,
    "a.ratio": 0.5,
    "a.text": "größer 你好",
    "a.words": ["", "x", "🙂"],
    "a.numbers": [1, 2, 3],
    "a.scores": [0.25, -1.0],
}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    return write_gguf(tmp_path / "m.gguf", METADATA, {"one": numbers, "two": np.arange(5, dtype=np.float16)})


def test_metadata_comes_back_as_plain_values(sample: Path) -> None:
    file = gguf_reader(sample)
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    assert file.metadata["general.architecture"] == "llama"
    assert file.version == 3


def test_tensors_come_back_bit_for_bit(sample: Path) -> None:
    tensors = gguf_reader(sample).tensors
    assert list(tensors) == ["one", "two"]
    assert (tensors["one"].shape, tensors["one"].type_name) == ((2, 3), "F32")
    assert np.array_equal(np.frombuffer(tensors["one"].data, np.float32), np.arange(6, dtype=np.float32))
    assert np.array_equal(np.frombuffer(tensors["two"].data, np.float16), np.arange(5, dtype=np.float16))


def test_quantized_tensors_have_the_size_that_gguf_gives_them(tmp_path: Path) -> None:
    weights = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf_reader(tmp_path / "q.gguf").tensors["w"]
    assert (tensor.shape, tensor.type_name, tensor.num_bytes) == ((4, 64), "Q8_0", packed.nbytes)
    assert bytes(tensor.data) == packed.tobytes()


def test_the_type_table_is_ggmls() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        assert TENSOR_TYPES.get(int(kind), (kind.name, block, size)) == (kind.name, block, size)
    needed = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}
    assert needed <= {name for name, _, _ in TENSOR_TYPES.values()}


def test_a_real_vocabulary_is_read_whole() -> None:
    metadata = gguf_reader(shared_data("golden", "llama.cpp-vocab", "ggml-vocab-llama-spm.gguf")).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert (len(tokens), tokens[:3], tokens[259], tokens[-1]) == (32_000, ["<unk>", "<s>", "</s>"], "▁▁", "给")
    assert metadata["tokenizer.ggml.scores"][258:262] == [0.0, -1e9, -1.0, -2.0]
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]) == (1, True)


def test_typed_access_names_the_key_and_both_types(sample: Path) -> None:
    file = gguf_reader(sample)
    assert file.get("a.count", int) == 7
    assert file.get("a.count", float) == 7.0
    assert file.get("absent", int) is None
    assert file.require("a.words", list) == ["", "x", "🙂"]
    with pytest.raises(ModelError, match=r"a\.text is str, expected int"):
        file.get("a.text", int)
    with pytest.raises(ModelError, match=r"a\.flag is bool, expected int"):
        file.get("a.flag", int)
    with pytest.raises(ModelError, match=r"lacks general\.nothing"):
        file.require("general.nothing", str)


def test_every_truncation_is_noticed(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    last = np.arange(5, dtype=np.float16).tobytes()
    end = whole.rindex(last) + len(last)  # only padding follows
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, end, 5), end - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError) as error:
            gguf_reader(cut)
        assert "\n" not in str(error.value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _small_file() -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    body = start + _string("general.alignment") + struct.pack("<II", 4, 32)
    body += _string("words") + struct.pack("<IIQ", 9, 8, 2) + _string("ab") + _string("cd")
    body += _string("w") + struct.pack("<IQQIQ", 2, 2, 2, 0, 0)
    return body + bytes(-len(body) % 32) + bytes(range(16))


def _read(content: bytes) -> dict[str, bytes] | ModelError:
    """The tensors' bytes, or the refusal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        try:
            return {name: bytes(tensor.data) for name, tensor in gguf_reader(path).tensors.items()}
        except ModelError as error:
            return error


def test_the_file_that_is_damaged_below_is_whole() -> None:
    assert _read(_small_file()) == {"w": bytes(range(16))}


@settings(deadline=None)
@given(st.data())
def test_damage_is_an_error_or_another_file_but_never_a_crash(data: st.DataObject) -> None:
    body = bytearray(_small_file())
    for position in data.draw(st.lists(st.integers(4, len(body) - 1), min_size=1, max_size=4)):
        body[position] = data.draw(st.integers(0, 255))
    found = _read(bytes(body))
    if isinstance(found, ModelError):
        assert "m.gguf" in str(found)
        assert "\n" not in str(found)
    else:  # whatever tensor it describes now, its bytes lie in the file
        assert all(value in bytes(body) for value in found.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and so on", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "announces .* tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _string("k") + struct.pack("<I", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + b"abcdef", "ends inside a string"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<II", 4, 1),
            "no valid UTF-8",
        ),
    ],
)
def test_each_kind_of_damage_has_its_own_words(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        gguf_reader(path)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*absent"):
        gguf_reader(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot read"):
        gguf_reader(tmp_path)
