"""The file that llama.cpp gets must hold the same weights and the same metadata as ours."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from benchmarks.gguf_to_f32 import convert


def write_model(path: Path) -> dict[str, np.ndarray]:
    """A GGUF with three tensor types and every kind of metadata that the writer is handed; its values, dequantized."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_name("tiny")
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_add_bos_token(True)
    writer.add_token_list(["a", "é", "<|end|>"])
    writer.add_token_scores([0.5, -1.0, 0.0])
    writer.add_token_types([1, 1, 3])
    expected = {}
    types = {"a": gguf.GGMLQuantizationType.Q4_1, "b": gguf.GGMLQuantizationType.Q8_0}
    for name, kind in types.items():
        packed = quantize(rng.standard_normal((4, 64), dtype=np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        expected[name] = dequantize(packed, kind)
    expected["norm"] = rng.standard_normal(64, dtype=np.float32)
    writer.add_tensor("norm", expected["norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_weights_and_metadata_survive(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "in.gguf")
    convert(tmp_path / "in.gguf", tmp_path / "out.gguf")
    before, after = gguf.GGUFReader(tmp_path / "in.gguf"), gguf.GGUFReader(tmp_path / "out.gguf")
    assert [tensor.name for tensor in after.tensors] == list(expected)
    for tensor in after.tensors:
        assert tensor.tensor_type is gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensor.data, expected[tensor.name])
    for name, field in before.fields.items():
        if name != "general.file_type":
            assert after.fields[name].contents() == field.contents(), name
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.ALL_F32
