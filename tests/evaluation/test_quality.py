"""Quality metrics: by hand, by property, and through the runtime against a plain transformers model."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.checkpoint.safetensors_writer import Spill
from optkit.evaluation.quality import (
    Comparison,
    KeptLogits,
    ModuleLogits,
    RuntimeLogits,
    compare_many,
    evaluation_windows,
    perplexity,
    windows,
)
from tests.support.comparison import compare


class Fixed:
    """A source with given logits, one [T, V] tensor a window."""

    def __init__(self, *tensors):
        self.tensors = tensors
        self.runs = 0

    def logits(self, token_windows):
        for tensor in self.tensors:
            self.runs += 1
            yield tensor


def random_source(seed, count=3, length=70, vocab=11):
    generator = torch.Generator().manual_seed(seed)
    return Fixed(*(torch.randn(length, vocab, generator=generator) for _ in range(count)))


WINDOWS = [[(i * 7 + j * 3) % 11 for i in range(70)] for j in range(3)]


def test_compare_gives_the_hand_computed_values():
    reference = Fixed(torch.tensor([[3.0, 1.0], [9.0, 9.0]]).log())  # p = 3/4, 1/4
    candidate = Fixed(torch.tensor([[1.0, 1.0], [9.0, 9.0]]).log())  # q = 1/2, 1/2
    report = compare(reference, candidate, [[0, 0]])
    assert report.tokens == 1
    assert report.reference_ppl.value == pytest.approx(4 / 3)
    assert report.ppl.value == pytest.approx(2)
    assert report.ln_ppl_ratio.value == pytest.approx(math.log(1.5))
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert report.kl_mean.value == pytest.approx(kl)
    assert report.kl_median == report.kl_p99 == report.kl_max == pytest.approx(kl)


def test_scores_by_position_are_means_over_each_range_of_the_windows():
    reference, candidate = random_source(0), random_source(1)
    report = compare(reference, candidate, WINDOWS)
    assert [(s.first, s.last) for s in report.by_position] == [(0, 15), (16, 31), (32, 63), (64, 68)]
    for score in report.by_position:
        positions = slice(score.first, score.last + 1)
        kl, same = [], []
        for p, q in zip(reference.tensors, candidate.tensors, strict=True):
            p, q = p[:-1][positions].double(), q[:-1][positions].double()
            target = torch.nn.functional.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="none").sum(-1)
            kl.append(target)
            same.append((p.argmax(-1) == q.argmax(-1)).double())
        assert score.kl.value == pytest.approx(float(torch.cat(kl).mean()), rel=1e-5)
        assert score.top1_agreement.value == pytest.approx(float(torch.cat(same).mean()))
    counts = [s.last - s.first + 1 for s in report.by_position]
    means = [s.kl.value for s in report.by_position]
    assert sum(n * m for n, m in zip(counts, means, strict=True)) / 69 == pytest.approx(report.kl_mean.value)


def test_compare_gives_0_when_the_sides_are_identical():
    report = compare(random_source(0), random_source(0), WINDOWS)
    assert report.kl_mean.value == report.kl_max == report.ln_ppl_ratio.value == 0
    assert report.top1_agreement.value == 1
    assert report.ppl == report.reference_ppl
    assert report.to_dict()["tokens"] == 3 * 69


def test_standard_errors_are_over_windows():
    # window 0 scores nll 0 on every token, window 1 scores ln 2: mean ln(2)/2, standard error ln(2)/2
    sure = torch.tensor([[0.0, -math.inf]] * 5)
    even = torch.zeros(5, 2)
    estimate = perplexity(Fixed(sure, even), [[0] * 5, [0] * 5])
    assert estimate.value == pytest.approx(math.sqrt(2))
    assert estimate.stderr == pytest.approx(math.sqrt(2) * math.log(2) / 2)


def test_impossible_tokens_of_both_sides_do_not_count():
    masked = torch.tensor([[1.0, 2.0, -math.inf]] * 3)
    assert compare(Fixed(masked), Fixed(masked + 1), [[0, 1, 0]]).kl_max == pytest.approx(0, abs=1e-6)


def test_nan_logits_are_an_error_and_not_a_number():
    broken = torch.zeros(70, 11)
    broken[3, 4] = math.nan
    with pytest.raises(FloatingPointError, match="candidate"):
        compare(Fixed(torch.zeros(70, 11)), Fixed(broken), WINDOWS[:1])


def test_different_vocabularies_are_refused():
    with pytest.raises(ValueError, match="shape"):
        compare(random_source(0), random_source(0, vocab=12), WINDOWS)


def test_many_candidates_run_the_reference_once():
    reference = random_source(0)
    reports = compare_many(reference, {"a": random_source(1), "b": random_source(0)}, WINDOWS)
    assert reference.runs == 3
    assert reports["a"].kl_mean.value > 0 == reports["b"].kl_mean.value


def test_windows_in_pieces_give_the_same_report():
    whole = compare_many(random_source(0), {"a": random_source(1)}, WINDOWS)
    sides = [random_source(seed) for seed in (0, 1)]
    first, rest = ([Fixed(*side.tensors[piece]) for side in sides] for piece in (slice(2), slice(2, 3)))
    comparison = Comparison(first[0], {"a": first[1]})
    comparison.add(WINDOWS[:2])
    comparison.reference, comparison.candidates = rest[0], {"a": rest[1]}
    comparison.add(WINDOWS[2:])
    assert comparison.measured == 3 and comparison.reports() == whole


def test_a_comparison_that_is_enough_computes_no_further_window():
    reference, candidate = random_source(0), random_source(1)
    comparison = Comparison(reference, {"a": candidate})
    comparison.add(WINDOWS, lambda: comparison.measured == 2)
    assert reference.runs == candidate.runs == comparison.measured == 2
    assert comparison.reports()["a"].windows == 2


def test_the_windows_of_less_text_are_the_first_of_more():
    class Words:
        bos_token_id = None

        def __call__(self, text, add_special_tokens=True):
            return type("Encoded", (), {"input_ids": [len(word) for word in text.split()]})

    few, many = (evaluation_windows(Words(), tokens, 64) for tokens in (512, 2048))
    assert many[: len(few)] == few and len(many) == 4 * len(few)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(-50, 50), st.floats(0.01, 1))
def test_metrics_keep_their_bounds(seed, shift, noise):
    reference, other = random_source(seed), random_source(seed + 1)
    moved = Fixed(*(a + noise * b + shift for a, b in zip(reference.tensors, other.tensors, strict=True)))
    report = compare(reference, moved, WINDOWS)
    assert 0 <= report.kl_median <= report.kl_p99 <= report.kl_max
    assert 0 <= report.top1_agreement.value <= 1
    ratio = math.log(report.ppl.value / report.reference_ppl.value)
    assert report.ln_ppl_ratio.value == pytest.approx(ratio, abs=1e-5)


@given(st.lists(st.integers(0, 5), min_size=0, max_size=60), st.integers(3, 20), st.booleans())
def test_windows_cover_a_prefix_without_overlap(tokens, length, with_bos):
    bos = [99] if with_bos else []
    step = length - len(bos)
    if len(tokens) < step:
        with pytest.raises(ValueError, match="0 windows"):
            windows(tokens, length, None, bos)
        return
    cut = windows(tokens, length, None, bos)
    assert all(len(window) == length and window[: len(bos)] == bos for window in cut)
    assert [t for window in cut for t in window[len(bos) :]] == tokens[: len(cut) * step]


def test_windows_says_what_is_missing():
    with pytest.raises(ValueError, match="nothing to predict"):
        windows([1, 2, 3], 1)
    with pytest.raises(ValueError, match="give 2 windows of 4, not 3"):
        windows(range(9), 4, 3)


class Squares:
    """Logits [T, 4] that follow from a window's tokens; every request is noted."""

    def __init__(self):
        self.requests = []

    def logits(self, token_windows):
        self.requests.append([list(window) for window in token_windows])
        for window in token_windows:
            yield torch.tensor(window)[:, None] ** 2 + torch.arange(4.0)


def test_kept_logits_ask_for_each_window_once_and_equal_the_source():
    source, requests = Squares(), [[[1, 2], [3, 4]], [[3, 4], [5, 6], [1, 2], [5, 6]], [[5, 6]]]
    kept = KeptLogits(lambda: source)
    for token_windows in requests:
        expected = list(Squares().logits(token_windows))
        found = list(kept.logits(token_windows))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert source.requests == [[[1, 2], [3, 4]], [[5, 6], [5, 6]]]


def test_kept_logits_beyond_the_limit_are_computed_again():
    source = Squares()
    kept = KeptLogits(lambda: source, limit=2 * 4 * 4)  # a window of 2 tokens x 4 logits x 4 bytes
    for _ in range(2):
        assert [rows[0, 0].item() for rows in kept.logits([[1, 2], [3, 4]])] == [1, 9]
    assert source.requests == [[[1, 2], [3, 4]], [[3, 4]]]


def resident_bytes(directory):
    """Bytes in memory of the mapped files below ``directory``, counted by the kernel."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            inside = str(directory) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_kept_logits_on_disk_leave_memory_after_use(tmp_path):
    token_windows, rows = [[index] * 8 for index in range(3)], (8, 1 << 20)  # 32 MiB a window
    sources = [torch.full(rows, float(index)) for index in range(3)]
    kept = KeptLogits(lambda: Fixed(*sources), spill=Spill(tmp_path))
    for _ in range(2):
        for index, found in enumerate(kept.logits(token_windows)):
            assert found.mean() == index
            assert resident_bytes(tmp_path) <= 33 << 20
        assert resident_bytes(tmp_path) <= 1 << 20


class Uniform:
    """A tokenizer of characters, with or without BOS."""

    bos_token_id = 1

    def __init__(self, bos):
        self.bos = bos

    def __call__(self, text, add_special_tokens=True):
        ids = [2 + ord(c) % 50 for c in text]
        return type("Encoding", (), {"input_ids": ([1] if self.bos and add_special_tokens else []) + ids})


@pytest.mark.parametrize("bos", [True, False])
def test_evaluation_windows_start_with_bos_if_the_model_wants_it(bos):
    cut = evaluation_windows(Uniform(bos), tokens=2048, length=512)
    assert [len(w) for w in cut] == [512] * 4
    assert all((w[0] == 1) == bos for w in cut)


# -- through the runtime ----------------------------------------------------------------------------


def tiny(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_runtime_logits_equal_the_module():
    from optkit.capture import boundary
    from optkit.capture.export import capture
    from optkit.lowering.lower import lower

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 97, (3 * 50,), generator=generator).tolist()
    cut = windows(tokens, 50)
    boundary.register()
    module = ModuleLogits(tiny("eager"))
    source = RuntimeLogits(lower(capture(tiny(boundary.NAME))), block_size=4, chunk=21, decode=5)
    report = compare(module, source, cut)
    assert report.kl_max < 1e-6 and report.top1_agreement.value == 1
    for expected, actual in zip(module.logits(cut), source.logits(cut), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


class Recorder:
    """An executable that only checks the batch and returns the token and its position as logits."""

    states = ()
    vocab_size = 2

    def __init__(self):
        self.steps = []

    def __call__(self, inputs):
        starts = inputs["query_start"].tolist()
        self.steps.append([b - a for a, b in itertools.pairwise(starts)])
        return torch.stack([inputs["input_ids"], inputs["positions"]], dim=1).float()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.integers(1, 30), st.integers(0, 9))
def test_chunks_put_every_row_where_it_belongs(lengths, chunk, decode):
    model = Recorder()
    cut = [list(range(n)) for n in lengths]
    for window, rows in zip(cut, RuntimeLogits(model, 4, chunk, decode).logits(cut), strict=True):
        assert rows[:, 0].tolist() == rows[:, 1].tolist() == window
    assert all(len(step) <= 2 and max(step) <= max(chunk, 1) for step in model.steps)


def test_windows_run_alone_and_without_a_copy_when_one_is_a_batch():
    model = Recorder()
    cut = [list(range(n)) for n in (35, 40, 52)]
    for window, rows in zip(cut, RuntimeLogits(model, 4, 40, 0, together=1).logits(cut), strict=True):
        assert rows[:, 0].tolist() == rows[:, 1].tolist() == window
    assert model.steps == [[35], [40], [40], [12]]


def test_decode_tail_runs_one_token_at_a_time():
    model = Recorder()
    list(RuntimeLogits(model, 4, 16, 3).logits([list(range(35))]))
    assert model.steps == [[16], [16], [1], [1], [1]]
