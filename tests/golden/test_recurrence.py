"""RNMT and BI-RNMT against the equations, written out in NumPy: one LSTM cell, one query, one node at a time.

`Reference` knows no batch, no mask, no padding and no axis of directions. It is given nodes (a token that some
hypothesis consumed), each with the node before it and the lists of nodes that are its futures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from toy import FAMILIES, pad, same_weights, streams, toy_model, toy_sources

from bothways.config import parse
from bothways.models.asynchronous import AsynchronousRNN
from bothways.models.interface import Lattice
from bothways.models.rnn import RNN
from bothways.models.table import build, resolve
from bothways.nn.layers import AdditiveAttention, bias_of, lstm
from bothways.tokens import FIRST_PREDICTED, PAD

Array = NDArray[np.float64]
SPANS = ["printed", "current"]
FAMILY = FAMILIES["rnn"]


# -- the equations ---------------------------------------------------------------------------------------------------


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()  # type: ignore[no-any-return]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@dataclass
class Node:
    """A token that was consumed."""

    token: int
    position: int
    parent: int | None  # the node before it
    futures: list[tuple[float, list[int]]] = field(default_factory=list)  # for each partner its share and nodes


def reached(nodes: Sequence[Node], chain: Sequence[int], position: int, span: str) -> list[int]:
    """Of a partner's nodes those that a position reads: k = 0 .. i - 1 as printed, or k = 0 .. i."""
    return [n for n in chain if nodes[n].position <= (position - 1 if span == "printed" else position)]


class Reference:
    """The model in float64 loops, from the weights' names."""

    def __init__(self, model: RNN | AsynchronousRNN) -> None:
        self.weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
        self.config, self.interaction = model.config, model.interaction

    def embed(self, name: str, token: int) -> Array:
        return self.weights[f"{name}_embedding.weight"][token] * math.sqrt(self.config.width)  # type: ignore[no-any-return]

    def layer_norm(self, name: str, x: Array) -> Array:
        y = (x - x.mean()) / math.sqrt(x.var() + 1e-5)
        return y * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]  # type: ignore[no-any-return]

    def cell(self, gates: Array, c: Array) -> tuple[Array, Array]:
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c

    def run(self, name: str, xs: Sequence[Array]) -> list[Array]:
        """One of the encoder's LSTMs over its inputs."""
        w = self.weights
        h = c = np.zeros(self.config.width)
        out = []
        for x in xs:
            gates = w[f"{name}.weight_ih_l0"] @ x + w[f"{name}.bias_ih_l0"]
            h, c = self.cell(gates + w[f"{name}.weight_hh_l0"] @ h + w[f"{name}.bias_hh_l0"], c)
            out.append(h)
        return out

    def encode(self, source: Sequence[int]) -> tuple[list[Array], list[Array]]:
        """The sources' states h_j, and the first state of every decoder layer."""
        xs = [self.embed("source", token) for token in source]
        l2r, r2l = self.run("encoder_l2r", xs), self.run("encoder_r2l", xs[::-1])[::-1]
        last = [l2r[-1], r2l[0]]
        left, right = np.split(self.weights["join.weight"], 2, axis=1)
        joined = [np.tanh(left @ a + right @ b + self.weights["join.bias"]) for a, b in zip(l2r, r2l, strict=True)]
        xs = [self.layer_norm("encoder_norms.0", x) for x in joined]
        for i in range(self.config.encoder_layers - 1):
            out = self.run(f"encoder.{i}", xs)
            last.append(out[-1])
            xs = [self.layer_norm(f"encoder_norms.{i + 1}", x + y) for x, y in zip(xs, out, strict=True)]
        begin = np.tanh(self.weights["begin.weight"] @ np.concatenate(last) + self.weights["begin.bias"])
        return xs, np.split(begin, self.config.decoder_layers)

    def attend(self, name: str, q: Array, states: Sequence[Array]) -> Array:
        """Σ_j softmax_j(vᵀ tanh(W q + U h_j)) h_j"""
        W, U, v = (self.weights[f"{name}.{key}"] for key in ("query.weight", "key.weight", "v"))
        shares = softmax(np.array([v @ np.tanh(W @ q + U @ h) for h in states]))
        return sum((a * h for a, h in zip(shares, states, strict=True)), np.zeros_like(q))

    def log_probs(self, source: Sequence[int], nodes: Sequence[Node], said: Sequence[Array] = ()) -> Array:
        """[node, V]"""
        hidden = [z for _, z in self.hidden(source, nodes, said)]
        logits = [self.weights["output.weight"][FIRST_PREDICTED:] @ z for z in hidden]
        return np.stack([np.concatenate([[-np.inf] * FIRST_PREDICTED, np.log(softmax(row))]) for row in logits])

    def hidden(
        self, source: Sequence[int], nodes: Sequence[Node], said: Sequence[Array] = ()
    ) -> list[tuple[Array, Array]]:
        """Every node's top state zᴸ and z; `said` are another decoder's top states, which all nodes read."""
        encoded, begin = self.encode(source)
        zero = np.zeros(self.config.width)
        w = self.weights

        @cache
        def states(n: int | None) -> tuple[list[Array], list[Array], Array]:
            """Every layer's h and c after a node, and the top state."""
            if n is None:
                return begin, [zero] * len(begin), zero
            hs, cs, _ = states(nodes[n].parent)
            fed = np.concatenate([attentional(nodes[n].parent), hs[0]])
            new_h, new_c, x = [], [], self.embed("target", nodes[n].token)
            for i in range(self.config.decoder_layers):
                gates = w[f"cells.{i}.inputs.weight"] @ x + w[f"cells.{i}.inputs.bias"]
                h, c = self.cell(gates + w[f"cells.{i}.recurrent.weight"] @ (hs[i] if i else fed), cs[i])
                x = self.layer_norm(f"decoder_norms.{i}", x + h if i else h)
                new_h, new_c = [*new_h, h], [*new_c, c]
            return new_h, new_c, x

        @cache
        def attentional(n: int | None) -> Array:
            """z_i = tanh(W_c [zᴸ_i ; c_i ; cz_i])"""
            if n is None:
                return zero
            top = states(n)[2]
            parts = [top, self.attend("source_attention", top, encoded)]
            matrix = w["combine.weight"]
            if said:
                matrix = np.concatenate([matrix, w["future_combine.weight"]], axis=1)
                parts.append(self.attend("future_attention", top, said))
            if self.interaction:
                matrix = np.concatenate([matrix, w["future_combine.weight"]], axis=1)
                read = [(share, [states(m)[2] for m in seen]) for share, seen in nodes[n].futures if seen]
                parts.append(sum((share * self.attend("future_attention", top, seen) for share, seen in read), zero))
            return np.tanh(matrix @ np.concatenate(parts))  # type: ignore[no-any-return]

        return [(states(n)[2], attentional(n)) for n in range(len(nodes))]


def stream_nodes(row: Tensor, span: str) -> list[Node]:
    """Streams of a training example [D, T], direction after direction; an ended one is read to its last token."""
    D, T = row.shape
    nodes = [Node(int(row[d, t]), t, d * T + t - 1 if t else None) for d in range(D) for t in range(T)]
    for n, node in enumerate(nodes if D == 2 else []):
        other = [m for m in range((1 - n // T) * T, (2 - n // T) * T) if nodes[m].token != PAD]
        node.futures = [(1.0, reached(nodes, other, node.position, span))]
    return nodes


def rnn(system: str = "bi-rnmt", seed: int = 0, **options: Any) -> RNN:
    model = toy_model(system, seed=seed, **options).double()
    assert isinstance(model, RNN)
    return model


# -- the layers ------------------------------------------------------------------------------------------------------


def test_a_cell_is_pytorchs_own() -> None:
    torch.manual_seed(1)
    cell = torch.nn.LSTMCell(3, 5, dtype=torch.float64)
    x, h, c = (torch.randn(4, n, dtype=torch.float64) for n in (3, 5, 5))
    given, gates = F.linear(x, cell.weight_ih, cell.bias_ih), F.linear(h, cell.weight_hh, cell.bias_hh)
    for found, expected in zip(lstm(given, gates, c), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(found, expected)


def test_additive_attention_reads_what_the_mask_allows() -> None:
    """And where that is nothing, the result and its gradients are finite."""
    torch.manual_seed(2)
    module = AdditiveAttention(4).double()
    states, q = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    mask = torch.rand(2, 3, 5) < 0.5
    mask[0, 1], mask[..., 0] = False, True
    mask[1, 2] = False
    found = module(q, module.prepare(states), states, bias_of(mask, torch.float64))
    reference = object.__new__(Reference)
    reference.weights = {f"a.{name}": value.detach().numpy() for name, value in module.state_dict().items()}
    for b in range(2):
        for i in range(3):
            seen = [states[b, int(j)].detach().numpy() for j in mask[b, i].nonzero()]
            if seen:
                expected = reference.attend("a", q[b, i].detach().numpy(), seen)
                torch.testing.assert_close(found[b, i], torch.tensor(expected))
    found.sum().backward()
    assert found.isfinite().all() and q.grad is not None and q.grad.isfinite().all()


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", FAMILY.shapes, ids=str)
@pytest.mark.parametrize("span", SPANS)
def test_teacher_forcing_follows_the_equations(span: str, shape: dict[str, Any]) -> None:
    """Streams of different length; two rows per source; padded sources."""
    model = rnn(seed=5, future_span=span, **shape)
    sources = toy_sources(5, 2)
    inputs = streams(5, [(4, 2), (1, 3), (4, 4), (0, 2)])
    found = model(pad(sources, 2), inputs)
    for r in range(len(inputs)):
        expected = Reference(model).log_probs(sources[r // 2].tolist(), stream_nodes(inputs[r], span))
        real = (inputs[r] != PAD).flatten()
        torch.testing.assert_close(found[r].flatten(0, 1)[real], torch.tensor(expected)[real])


@pytest.mark.parametrize("system", ["rnmt-l2r", "rnmt-r2l", "rnmt-no-interaction"])
def test_systems_without_interaction_follow_the_equations(system: str) -> None:
    model = rnn(system, seed=6)
    sources, inputs = toy_sources(6, 2), streams(6, [(4, 2), (1, 3)])
    inputs = {"rnmt-l2r": inputs[:, :1], "rnmt-r2l": inputs[:, 1:]}.get(system, inputs)
    found = model(pad(sources), inputs)
    for r in range(2):
        expected = Reference(model).log_probs(sources[r].tolist(), stream_nodes(inputs[r], "printed"))
        real = (inputs[r] != PAD).flatten()
        torch.testing.assert_close(found[r].flatten(0, 1)[real], torch.tensor(expected)[real])


@pytest.mark.parametrize("shape", FAMILY.shapes, ids=str)
def test_the_asynchronous_model_follows_the_equations(shape: dict[str, Any]) -> None:
    """Each l2r position reads every top state of the second stream's tag and tokens, and none of its padding."""
    model = toy_model("abd-rnmt", seed=11, **shape).double()
    assert isinstance(model, AsynchronousRNN)
    first, second = Reference(model.first), Reference(model)
    second.weights = {**first.weights, **second.weights}  # its own, where it has any of that name
    sources = toy_sources(11, 2)
    inputs = torch.cat([streams(11, [(4, 2), (1, 6)]), streams(12, [(0, 4), (0, 6)])[:, 1:]], dim=1)
    found = model(pad(sources, 1), inputs)
    for r in range(2):
        alone = [
            [node for node in stream_nodes(inputs[r, d : d + 1], "printed") if node.token != PAD] for d in range(3)
        ]
        source = sources[r].tolist()
        said = [top for top, _ in first.hidden(source, alone[1])]
        expected = [second.log_probs(source, alone[0], said), *(first.log_probs(source, nodes) for nodes in alone[1:])]
        for d in range(3):
            torch.testing.assert_close(found[r, d, : len(alone[d])], torch.tensor(expected[d]))
        silent = second.log_probs(source, alone[0])  # that the states matter
        assert np.abs(silent[:, FIRST_PREDICTED:] - expected[0][:, FIRST_PREDICTED:]).max() > 0.02


@pytest.mark.parametrize("mixed", [False, True], ids=["one partner", "mixed partners"])
@pytest.mark.parametrize("span", SPANS)
def test_a_step_follows_the_equations(span: str, mixed: bool) -> None:
    """Random hypotheses, parents, partners, shares, halves without a future and hypotheses that consume nothing."""
    model = rnn(seed=7, future_span=span)
    generator = torch.Generator().manual_seed(7)
    B, D, K, P = 2, 2, 3, 3 if mixed else 1
    sources = toy_sources(7, B)
    state = model.start(model.encode(pad(sources, 1)), D, K)
    nodes: list[list[Node]] = [[] for _ in range(B)]
    chains: list[list[list[list[int]]]] = [[[[] for _ in range(K)] for _ in range(D)] for _ in range(B)]
    for step in range(4):
        tokens = torch.randint(4, 9, (B, D, K), generator=generator) if step else torch.tensor([1, 2])[None, :, None]
        tokens = tokens.expand(B, D, K).clone()
        if step == 2:
            tokens[0, 1, 2] = tokens[1, 0, 0] = PAD
        partners = torch.randint(K, (B, D, K, P), generator=generator)
        weights = torch.rand(B, D, K, P, generator=generator, dtype=torch.float64) if mixed else torch.ones(B, D, K, P)
        weights[1, 0] = 0.0 if step == 3 else weights[1, 0]
        newest = {}
        for b, d, k in torch.cartesian_prod(*(torch.arange(n) for n in (B, D, K))).tolist():
            if tokens[b, d, k] != PAD:
                newest[b, d, k] = len(nodes[b])
                chain = chains[b][d][k]
                nodes[b].append(Node(int(tokens[b, d, k]), step, chain[-1] if chain else None))
                chains[b][d][k] = [*chain, newest[b, d, k]]
        for b, d, k in newest:
            nodes[b][newest[b, d, k]].futures = [
                (w, reached(nodes[b], chains[b][1 - d][slot], step, span))
                for slot, w in zip(partners[b, d, k].tolist(), weights[b, d, k].tolist(), strict=True)
            ]
        following, state = model.step(tokens, state, partners, weights)
        found = following.log_probs()
        for b in range(B):
            expected = torch.tensor(Reference(model).log_probs(sources[b].tolist(), nodes[b]))
            for (row, d, k), n in newest.items():
                if row == b:
                    torch.testing.assert_close(found[b, d, k], expected[n])
        origins = torch.randint(K, (B, D, K), generator=generator)
        state = state.select(origins)
        chains = [[[chains[b][d][int(k)] for k in origins[b, d]] for d in range(D)] for b in range(B)]


@pytest.mark.parametrize("span", SPANS)
def test_replay_follows_the_equations(span: str) -> None:
    """Any trees of nodes in any order: some have two partners, some none, and the directions differ in their steps."""
    model = rnn(seed=8, future_span=span)
    generator = torch.Generator().manual_seed(8)
    D, N, P = 2, 7, 2
    (source,) = toy_sources(8, 1)
    parents = [[None, 0, 0, 1, 2, 3, 3], [None, 0, 1, 1, 3, None, 5]]
    nodes = []
    for d in range(D):
        for parent in parents[d]:
            position = 0 if parent is None else nodes[d * N + parent].position + 1
            above = None if parent is None else d * N + parent
            nodes.append(Node(int(torch.randint(4, 9, (), generator=generator)), position, above))
    order = [torch.randperm(N, generator=generator) for _ in range(D)]  # of each direction, in the lattice
    own, seen = torch.zeros(D, N, N, dtype=torch.bool), torch.zeros(D, N, P, N, dtype=torch.bool)
    weights = torch.rand(D, N, P, generator=generator, dtype=torch.float64)
    weights[:, 1] = 0.0
    places = [order[d].argsort().tolist() for d in range(D)]
    chains: list[list[int]] = []
    for n, node in enumerate(nodes):
        chains.append([*(chains[node.parent] if node.parent is not None else []), n])
        own[n // N, places[n // N][n % N], [places[m // N][m % N] for m in chains[n]]] = True
    for n, node in enumerate(nodes):
        d, place = n // N, places[n // N][n % N]
        partners = torch.randint(N, (P,), generator=generator).tolist()
        for p, m in enumerate(partners):
            chain = chains[(1 - d) * N + m]
            seen[d, place, p, [places[1 - d][k % N] for k in chain]] = True
            node.futures.append((float(weights[d, place, p]), reached(nodes, chain, node.position, span)))
    tokens, positions = (
        torch.tensor([[getattr(nodes[d * N + int(n)], name) for n in order[d]] for d in range(D)])
        for name in ("token", "position")
    )
    found = model.replay(model.encode(source[None]), Lattice(tokens, positions, own, seen, weights))
    expected = torch.tensor(Reference(model).log_probs(source.tolist(), nodes))
    for n in range(D * N):
        torch.testing.assert_close(found[n // N, places[n // N][n % N]], expected[n])


@pytest.mark.parametrize("span", SPANS)
def test_the_interaction_changes_what_is_predicted(span: str) -> None:
    """Otherwise every test of it would pass without it."""
    model = toy_model("bi-rnmt", seed=9, future_span=span)
    apart = same_weights(model, "rnmt-no-interaction")
    source, inputs = pad(toy_sources(9, 2)), streams(9, [(4, 4), (3, 4)])
    assert (model(source, inputs) - apart(source, inputs))[..., FIRST_PREDICTED:].abs().max() > 0.02


@pytest.mark.parametrize("system, off", [("bi-rnmt", "rnmt-no-interaction"), ("abd-rnmt", "abd-rnmt")])
def test_interaction_begins_where_it_changes_nothing_and_learns(system: str, off: str) -> None:
    """Where the other weights come from a model without it: W_c's third block is zero, and has a gradient."""
    config = resolve(parse({"system": system, "data": "-", "model": FAMILY.shape}))
    model = build(config, 9, 9)
    source, inputs = pad(toy_sources(1, 2)), streams(1, [(4, 4), (3, 4)])
    apart = same_weights(model, off, interaction=False)
    real = inputs != PAD

    def differs() -> bool:
        return not torch.allclose(model(source, inputs)[real], apart(source, inputs)[real], rtol=0, atol=1e-6)

    model.eval()
    assert differs()
    model.begin_interaction()
    assert not differs()
    model(source, inputs)[0, 0, :, FIRST_PREDICTED].sum().backward()
    gradient = model.get_parameter("future_combine.weight").grad
    assert gradient is not None and gradient.abs().max() > 0
