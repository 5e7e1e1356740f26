"""The stated size of the weights is that of what is held."""

from __future__ import annotations

import pytest
import torch

from headstart.hub import files_of_folder
from headstart.models import load_model
from headstart.models.footprint import held_bytes
from headstart.ops import TorchOps
from headstart.perf import read_model_spec
from tests.fixtures.stories import shared_data


def test_each_storage_counts_once_and_packed_ones_too():
    dense = torch.zeros(10, 4)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8), 64)
    assert held_bytes(dense, (dense[2:], dense.T), [packed]) == 10 * 4 * 4 + 8 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_operations_hold_the_parameters_and_no_more(dtype):
    files = files_of_folder(shared_data("models", "stories260K-hf"))
    spec = read_model_spec(files)
    decoder = load_model(files, spec, device="cpu", dtype=dtype, ops=TorchOps())
    assert decoder.num_weight_bytes == spec.num_parameters * dtype.itemsize


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="weights are packed by oneDNN")
def test_a_tied_matrix_that_is_packed_again_is_counted_again():
    files = files_of_folder(shared_data("models", "stories260K-hf"))
    spec = read_model_spec(files)
    assert spec.tie_word_embeddings
    decoder = load_model(files, spec, device="cpu", dtype=torch.float32)
    assert decoder.num_weight_bytes == 4 * (spec.num_parameters + spec.vocab_size * spec.hidden_size)
