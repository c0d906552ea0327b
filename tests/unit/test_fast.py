"""What makes decoding fast changes no result: packed weights, attention by few queries, workers, batches that halve."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy import CLOSE, difference, settings, toy_model, toy_sources

import bothways.nn.layers as layers
from bothways.errors import SearchError
from bothways.models.interface import Seq2Seq
from bothways.nn.attention import _attend_by_few, attend
from bothways.nn.layers import Linear, linear, output_layer, pack_when_used
from bothways.search.hypothesis import Found
from bothways.tokens import L2R, R2L
from bothways.translator import LONGEST_SOURCE, Translator, decode

CPU = torch.device("cpu")
ONEDNN = pytest.mark.skipif(torch.float32 not in layers.ONEDNN_DTYPES, reason="this PyTorch has no oneDNN")
BFLOAT16 = pytest.mark.skipif(torch.bfloat16 not in layers.ONEDNN_DTYPES, reason="this CPU has no bfloat16")


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def packed_linear(inputs: int = 40, outputs: int = 70) -> Linear:
    torch.manual_seed(2)
    layer = Linear(inputs, outputs)
    pack_when_used(layer, wanted=True)
    return layer


# -- products ----------------------------------------------------------------------------------------------------------


@ONEDNN
@pytest.mark.parametrize("rows", [1, 5, 64, 100])
@pytest.mark.parametrize("then", ["none", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BFLOAT16)])
def test_a_packed_weight_computes_the_same(no_grad: None, rows: int, then: str, dtype: torch.dtype) -> None:
    layer, x = packed_linear().to(dtype), torch.randn(rows, 40, dtype=dtype)
    plain = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    expected = plain.relu() if then == "relu" else plain
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(linear(x, layer.weight, layer.bias, then).double(), expected, **close)
    assert layer.weight.packed.blocks[70][0].is_mkldnn


@ONEDNN
def test_a_weight_that_changes_is_packed_anew(no_grad: None) -> None:
    layer, x = packed_linear(), torch.randn(3, 40)
    for change in (
        lambda: layer.weight.mul_(2.0),
        lambda: layer.load_state_dict(packed_linear().state_dict()),
        lambda: setattr(layer.weight, "data", torch.randn(70, 40)),
        lambda: layer.to(torch.float64).to(torch.float32),
    ):
        layer(x)
        change()
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_model_that_learns_has_no_packed_weights() -> None:
    model = toy_model()
    with torch.inference_mode():
        model(toy_sources(count=1)[0][None], torch.tensor([[[1], [2]]]))
    weights = [p for p in model.parameters() if p.dim() == 2]
    assert all(hasattr(p, "packed") for p in weights)
    assert not any(hasattr(p, "packed") for p in copy.deepcopy(model).parameters())
    model.train()
    assert not any(hasattr(p, "packed") for p in weights)


def test_a_model_made_in_inference_mode_decodes() -> None:
    with torch.inference_mode():
        model = toy_model()
    assert len(found(model, 3)) == 3


@ONEDNN
def test_an_update_by_adam_is_seen_when_the_model_decodes_again() -> None:
    """A fused Adam leaves no trace on a weight's version."""
    model, source = toy_model("transformer-l2r"), toy_sources(count=1)[0][None]
    inputs = torch.tensor([[[1, 4, 5]]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.inference_mode():
            found = model.eval()(source, inputs)
        expected = model.train()(source, inputs)  # the plain way; a toy has no dropout to speak of
        model.eval()
        torch.testing.assert_close(found, model(source, inputs).detach(), atol=CLOSE, rtol=0)
        model.train()
        expected[..., 3:].sum().backward()
        optimizer.step()


@BFLOAT16
@pytest.mark.parametrize("words", [100, 4096, 9000])
def test_the_output_layer_in_blocks_is_the_whole(no_grad: None, words: int) -> None:
    weight = nn.Parameter(torch.randn(words, 16).bfloat16())
    pack_when_used(nn.ParameterList([weight]), wanted=True)
    x = torch.randn(2, 3, 16).bfloat16()
    found = output_layer(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.linear(x.float(), weight.float()), atol=0.05, rtol=0.01)
    assert len(weight.packed.blocks[layers.BLOCK]) == -(-words // layers.BLOCK)


@BFLOAT16
@pytest.mark.parametrize("int8", [False, True])
def test_a_weight_serves_as_a_layer_and_as_output_layer(no_grad: None, int8: bool) -> None:
    weight = nn.Parameter(torch.randn(5000, 16).bfloat16())
    weight.packed = layers.Packed(int8)  # type: ignore[attr-defined]
    x = torch.randn(3, 16).bfloat16()
    for _ in range(2):
        torch.testing.assert_close(output_layer(x, weight), linear(x, weight).float(), atol=0.5, rtol=0.05)


# -- attention ---------------------------------------------------------------------------------------------------------


def test_attention_by_few_is_attention(no_grad: None) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 8) for n in (4, 10, 10))
    mask = torch.rand(2, 1, 4, 10) > 0.4
    mask[..., 0] = True
    torch.testing.assert_close(_attend_by_few(q, k, v, mask), attend(q, k, v, mask))
    some = [x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(attend(*some, mask).float(), attend(q, k, v, mask), atol=0.03, rtol=0.03)


def test_a_query_that_may_read_nothing_spreads_no_nan(no_grad: None) -> None:
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    assert _attend_by_few(q, k, v, torch.zeros(1, 1, 2, 2, dtype=torch.bool)).isfinite().all()


# -- workers and memory ------------------------------------------------------------------------------------------------


def found(model: Seq2Seq, count: int, **options: object) -> list[Found]:
    """Results in the order of their sources."""
    sources = [source[:-1].tolist() for source in toy_sources(5, count, longest=9)]
    config = settings(max_length=8, batch_sentences=4, **options)
    return [one for _, one in sorted(decode(model, sources, (L2R, R2L), config, CPU), key=lambda pair: pair[0])]


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_workers_find_what_one_finds(two_threads: None, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    model = toy_model()
    several = found(model, count)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr("bothways.translator.MOST_WORKERS", 1)
    alone = found(model, count)
    assert [difference(a, b) for a, b in zip(several, alone, strict=True)] == [""] * count


def test_workers_can_be_left_and_can_fail(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    results = decode(model, [[4, 5]] * 40, (L2R, R2L), settings(max_length=5, batch_sentences=2), CPU)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 2

    def fail(source: Tensor) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(model, "encode", fail)
    with pytest.raises(ValueError, match="no such thing"):
        found(model, 5)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")]
)
def test_out_of_memory_halves_the_batch(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    model = toy_model()
    expected, encode, sizes = found(model, 7), model.encode, []

    def encode_few(source: Tensor) -> object:
        sizes.append(len(source))
        if len(source) > 1:
            raise error
        return encode(source)

    monkeypatch.setattr(model, "encode", encode_few)
    assert [difference(a, b) for a, b in zip(found(model, 7), expected, strict=True)] == [""] * 7
    assert sizes == [4, 2, 1, 1, 2, 1, 1, 3, 1, 2, 1, 1]


def test_what_is_not_about_memory_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()

    def fail(source: Tensor) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(model, "encode", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        found(model, 3)


def test_one_sentence_too_many_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()

    def full(source: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(model, "encode", full)
    with pytest.raises(SearchError, match=r"out of memory with one sentence of \d+ tokens; lower search\.beam"):
        found(model, 3)


def test_a_sentence_of_1000_tokens_decodes() -> None:
    model = toy_model(decoder_layers=1)
    source = [4 + i % 5 for i in range(1000)]
    assert len(source) <= LONGEST_SOURCE
    config = settings(beam=2, max_length=1000, early_stop=False, nbest=1)  # goes on to the last step
    [(_, one)] = decode(model, [source], (L2R, R2L), config, CPU, trace=True)
    assert one.trace is not None and len(one.trace.steps) == 1002
    assert one.hypotheses


# -- int8 --------------------------------------------------------------------------------------------------------------


@BFLOAT16
@pytest.mark.parametrize("words", [100, 9000])
def test_int8_comes_close(no_grad: None, words: int) -> None:
    torch.manual_seed(4)
    weight = nn.Parameter(torch.randn(words, 64).bfloat16())
    weight.packed = layers.Packed(int8=True)  # type: ignore[attr-defined]
    x = torch.randn(2, 3, 64).bfloat16()
    x[0, 0] *= 100
    exact = F.linear(x.float(), weight.float())
    error = (output_layer(x, weight) - exact).std(-1) / exact.std(-1)
    assert 0 < float(error.max()) < 0.02  # of each row, however large its neighbours are


@BFLOAT16
def test_int8_does_not_depend_on_the_batch() -> None:
    model = toy_model("bift", vocabulary=300, width=16).in_precision("int8")
    sources = [source[:-1].tolist() for source in toy_sources(3, 12, vocabulary=300)]
    together, alone = (
        dict(decode(model, sources, (L2R, R2L), settings(max_length=6, batch_sentences=n), CPU)) for n in (12, 1)
    )
    same = sum(together[i].hypotheses[0].tokens == alone[i].hypotheses[0].tokens for i in range(12))
    assert same >= 10  # bfloat16 around it is not exact
    assert model.output_weight.packed.int8_blocks  # type: ignore[attr-defined]
    model.train().eval()
    assert model.output_weight.packed.int8  # type: ignore[attr-defined]
    model.in_precision("bfloat16")
    assert not model.output_weight.packed.int8  # type: ignore[attr-defined]


def test_int8_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bothways.translator.device_of", lambda _: "cuda")
    with pytest.raises(SearchError, match="--precision: int8 is for CPUs; accepted on cuda: float32, bfloat16"):
        Translator.open("run", precision="int8")
