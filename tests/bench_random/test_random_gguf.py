import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bench import random_gguf, random_llama
from optkit.checkpoint.locate import packaged_gguf

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 49200, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random") / "model"
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_llama.SHAPES, "tiny", TINY)
        random_llama.write_model(directory, "tiny", tokenizer)
    return directory


@pytest.fixture(scope="module")
def file(directory):
    target = directory / "model.gguf"
    random_gguf.write_gguf(directory, packaged_gguf("smollm2-135m"), target)
    return target


def test_transformers_reads_the_same_weights(directory, file):
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    read = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file.name).state_dict()
    assert set(read) == set(expected)
    for name, value in expected.items():
        assert torch.equal(read[name].float(), value.float()), name


def test_the_vocabulary_is_padded(file):
    fields = gguf.GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == TINY["vocab_size"]
    assert tokens[0] == "<|endoftext|>"
    assert tokens[-1].startswith("[unused")


def test_rope_factors_are_those_of_transformers(directory):
    config = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = TINY["hidden_size"] // TINY["num_attention_heads"]
    plain = 1 / 500000.0 ** (torch.arange(0, size, 2) / size)
    factors = random_gguf.rope_factors({**random_llama.config_of("1b"), **TINY})
    torch.testing.assert_close(plain / torch.from_numpy(factors), scaled.float())
