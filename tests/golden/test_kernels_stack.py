"""The LSTM decoder by kernels against the decoder position by position, and additive attention's against its formula.

Without a GPU, Triton's interpreter runs the kernels.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toy import pad, streams, toy_model, toy_sources

pytest.importorskip("triton")

from bothways.kernels import additive
from bothways.kernels.additive import Attention, Gradients, Place
from bothways.kernels.stack import Dropout
from bothways.models.rnn import RNN, RNNMemory, _FutureOfStreams
from bothways.nn.attention import partner
from bothways.nn.layers import AdditiveAttention, bias_of
from bothways.tokens import END, PAD

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {
    "one direction": ("rnmt-l2r", {"width": 24}),
    "one layer": ("rnmt-no-interaction", {"width": 8, "decoder_layers": 1}),
    "three layers": ("rnmt-no-interaction", {"width": 8, "decoder_layers": 3}),
    "printed": ("bi-rnmt", {"width": 24, "future_span": "printed"}),
    "current": ("bi-rnmt", {"width": 8, "future_span": "current"}),
}
LENGTHS = {
    "rnmt-l2r": [[4], [2], [1]],
    "rnmt-no-interaction": [[4, 4], [2, 2]],
    "bi-rnmt": [[4, 3], [1, 2], [3, 3], [2, 1]],
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of keys, and of columns, where a toy would fill one."""
    monkeypatch.setattr(additive, "AT_ONCE", 2)
    monkeypatch.setattr(additive, "COLUMNS", 16)
    monkeypatch.setattr(additive, "KEYS", 2)


def scene(case: str, dropout: float) -> tuple[RNN, RNNMemory, Tensor]:
    """A model in training, sources of which one has no words, and streams; two rows read each of BI-RNMT's."""
    system, options = CASES[case]
    model = toy_model(
        system, dropout=dropout, **({"future_dropout": dropout} if system == "bi-rnmt" else {}), **options
    )
    assert isinstance(model, RNN)
    model.to(DEVICE).train()
    inputs = streams(3, LENGTHS[system]).to(DEVICE)
    sources = pad(toy_sources(count=len(inputs) // (2 if system == "bi-rnmt" else 1)))
    sources[-1] = torch.where(torch.arange(sources.size(1)) == 0, END, PAD)
    torch.manual_seed(1)
    return model, model.encode(sources.to(DEVICE)), inputs


def passed(
    model: RNN, memory: RNNMemory, inputs: Tensor, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the gradients of everything that went into them."""
    monkeypatch.setattr("bothways.kernels.usable", lambda x: at_once)
    leaves = {name: getattr(memory, name).detach().requires_grad_() for name in ("encoded", "keys", "begin")}
    memory = RNNMemory(leaves["encoded"], leaves["keys"], memory.bias, leaves["begin"])
    model.zero_grad()
    torch.manual_seed(2)
    together = model.interaction and inputs.size(1) == 2
    out, _ = model._through(inputs, memory, _FutureOfStreams(model, inputs) if together else None)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).sin()).sum().backward()
    leaves |= {name: p for name, p in model.named_parameters()}
    return out, {name: x.grad.clone() for name, x in leaves.items() if x.grad is not None}


def replayed(drawn: list[Dropout | None], T: int, lag: int) -> Iterator[tuple[Tensor, float]]:
    """The dropout of every position in the order in which `_advance` asks for it."""
    *futures, hidden = drawn
    for t in range(T):
        for layer in hidden.kept[:-1]:
            yield layer[t], hidden.scale
        if futures and t >= lag:
            yield futures[0].kept[t], futures[0].scale
        yield hidden.kept[-1, t], hidden.scale


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("case", CASES)
def test_all_positions_at_once_are_the_positions_one_by_one(
    case: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, memory, inputs = scene(case, dropout)
    drawn, draw, drop = [], Dropout.drawn, F.dropout

    def recorded(*arguments: Any, **named: Any) -> Dropout | None:
        drawn.append(draw(*arguments, **named))
        return drawn[-1]

    monkeypatch.setattr(Dropout, "drawn", recorded)
    found, gradients = passed(model, memory, inputs, True, monkeypatch)
    if dropout:
        places = replayed(drawn, inputs.size(2), model.lag)

        def replay(x: Tensor, share: float, training: bool) -> Tensor:
            if x.shape[:3] == inputs.shape:  # that of the words
                return drop(x, share, training)
            kept, scale = next(places)
            return x * kept.view(x.shape) * scale

        monkeypatch.setattr(F, "dropout", replay)
    expected, slow = passed(model, memory, inputs, False, monkeypatch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert gradients.keys() == slow.keys() and all(x.any() for x in slow.values())
    for name, gradient in slow.items():
        torch.testing.assert_close(gradients[name], gradient, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    if dropout:
        assert next(places, None) is None


@pytest.mark.parametrize("decoded", [True, False])
def test_both_passes_of_abd_are_their_positions_one_by_one(decoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second reads the first's states, whose gradient flows on into the first."""
    model = toy_model("abd-rnmt", width=24, dropout=0.0).to(DEVICE).train()
    sources = pad(toy_sources(count=3)).to(DEVICE)
    inputs = streams(3, [[4, 3], [1, 2], [3, 1]]).to(DEVICE)[:, : 2 if decoded else 1]
    found = []
    for at_once in (True, False):
        monkeypatch.setattr("bothways.kernels.usable", lambda x, now=at_once: now)
        model.zero_grad()
        out = model.hidden(model.encode(sources), inputs)
        (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).sin()).sum().backward()
        found.append((out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (fast, gradients), (slow, expected) = found
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_dropout_leaves_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    dropout = Dropout.drawn(0.3, 100, 100, device=DEVICE)
    assert dropout is not None and abs(float(dropout.kept.float().mean()) - 0.7) < 0.02
    assert abs(float(dropout.kept.float().mean()) * dropout.scale - 1) < 0.03
    assert Dropout.drawn(0.0, 2, device=DEVICE) is None


@pytest.mark.skipif(DEVICE.type == "cpu", reason="bfloat16 is what a GPU trains in")
@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_they_are_as_near_as_that_allows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory, inputs = scene(case, 0.0)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        memory = model.encode(pad(toy_sources(count=len(memory.encoded))).to(DEVICE))
        slow, by_steps = passed(model, memory, inputs, False, monkeypatch)
        fast, at_once = passed(model, memory, inputs, True, monkeypatch)
    torch.testing.assert_close(fast.float(), slow.float(), atol=0.05, rtol=0.05)
    apart = sum(float((at_once[n].float() - by_steps[n].float()).norm() ** 2) for n in by_steps) ** 0.5
    assert apart < 0.05 * sum(float(x.float().norm() ** 2) for x in by_steps.values()) ** 0.5


@pytest.mark.parametrize(("group", "flip", "length"), [(3, 0, 7), (1, 1, 5), (1, 1, 0)])
def test_attention_is_its_formula(group: int, flip: int, length: int) -> None:
    """Two positions ask; the keys' gradients come from both."""
    torch.manual_seed(0)
    T, rows, N, E = 2, 6, 7, 20
    sides = rows // group
    layer = AdditiveAttention(E).to(DEVICE)
    q, out = (torch.randn(T, rows, E, device=DEVICE) for _ in range(2))
    (
        keys,
        values,
    ) = (torch.randn(sides, N, E, device=DEVICE) for _ in range(2))
    grad, bias = torch.randn_like(q), bias_of(torch.rand(sides, N, device=DEVICE) < 0.7, torch.float32)
    bias[0] = torch.finfo(torch.float32).min  # nothing may be read
    scores, totals = q.new_zeros(T, rows, N), q.new_zeros(T, rows, 2)
    attention = Attention(
        Place(q, 1, rows), Place(keys, N, 1), Place(values, N, 1), bias, layer.v.detach(), Place(out, 1, rows),
        scores, totals, group, flip,
    )  # fmt: skip
    grads = Gradients(torch.zeros_like(q), q.new_zeros(rows, E), torch.zeros_like(scores), torch.zeros_like(scores))
    for t in range(T):
        attention.forward(t, length)
        attention.backward(t, length, grad, grads)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    attention.gathered(grad, grads, range(N), range(T), Place(grad_keys, N, 1), grad_values)

    leaves = [x.clone().requires_grad_() for x in (q, keys, values)]

    def seen(x: Tensor) -> Tensor:
        """[sides, n, ...] as rows see them, [rows, length, ...]."""
        each = x[:, :length].repeat_interleave(group, dim=0)
        return partner(each.view(rows // 2, 2, *each.shape[1:])).flatten(0, 1) if flip else each

    tops = leaves[0].transpose(0, 1)  # [rows, T, E]
    with torch.no_grad():
        layer.query.weight.copy_(torch.eye(E))
    expected = layer(tops, seen(leaves[1]), seen(leaves[2]), seen(bias)[:, None]).transpose(0, 1)
    expected.backward(grad)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-4)
    for found, leaf in zip((grads.query, grad_keys, grad_values), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads.v.sum(0), layer.v.grad, atol=1e-5, rtol=1e-4)
