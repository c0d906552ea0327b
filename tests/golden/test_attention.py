"""Attention and the whole model against the equations, written out in NumPy: one query, one head, one node at a time.

`Reference` knows no batch, no mask, no cache and no axis of directions. It is given nodes (a token that some
hypothesis consumed), and for each of them the list of nodes that it reads as its past and as its futures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from toy import FAMILIES, pad, same_weights, streams, toy_model, toy_sources

from bothways.models.asynchronous import AsynchronousTransformer
from bothways.models.interface import Lattice
from bothways.models.transformer import Transformer
from bothways.nn.attention import History, SelfAttention, SourceAttention, SynchronousAttention, View
from bothways.nn.fusion import Fusion, Gate, Linear, Tanh
from bothways.stepwise import Clock
from bothways.tokens import FIRST_PREDICTED, PAD

Array = NDArray[np.float64]
TANH = FAMILIES["transformer"].meetings[0]
MEETINGS = [
    {"fusion": "tanh", "future_weight": 0.1},
    {"fusion": "linear", "future_weight": 1.5},
    {"fusion": "gate"},
    {"fusion": "tanh", "future_weight_learned": True},
    {"fusion": "linear", "future_weight_learned": True},
]


# -- the equations ---------------------------------------------------------------------------------------------------


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()  # type: ignore[no-any-return]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def read(q: Array, keys: Sequence[Array], values: Sequence[Array]) -> Array:
    """softmax(q · Kᵀ / √d) · V for one query and one head."""
    share = softmax(np.array([float(np.dot(q, k)) for k in keys]) / math.sqrt(len(q)))
    return sum((w * v for w, v in zip(share, values, strict=True)), np.zeros_like(q))


@dataclass
class Node:
    """A token that was consumed."""

    token: int
    position: int
    past: list[int]  # nodes it reads: those it descends from, and itself
    futures: list[tuple[float, list[int]]]  # for each partner its share and nodes


class Reference:
    """The Transformer and BIFT in float64 loops, from the weights' names."""

    def __init__(self, model: Transformer | AsynchronousTransformer) -> None:
        self.weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
        self.config, self.interaction = model.config, model.interaction

    def linear(self, name: str, x: Array) -> Array:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]  # type: ignore[no-any-return]

    def layer_norm(self, name: str, x: Array) -> Array:
        y = (x - x.mean()) / math.sqrt(x.var() + 1e-5)
        return y * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]  # type: ignore[no-any-return]

    def heads(self, x: Array) -> list[Array]:
        return np.split(x, self.config.heads)

    def embed(self, name: str, token: int, position: int) -> Array:
        E = self.config.width
        angles = [position / 10000 ** (2 * i / E) for i in range(E // 2)]
        waves = np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        return self.weights[f"{name}.weight"][token] * math.sqrt(E) + waves  # type: ignore[no-any-return]

    def sub_layer(self, name: str, xs: list[Array], function: Any) -> list[Array]:
        """x + f(norm(x)) or norm(x + f(x)); f is given all nodes, and returns all."""
        if self.config.norm == "pre":
            return [x + y for x, y in zip(xs, function([self.layer_norm(name, x) for x in xs]), strict=True)]
        return [self.layer_norm(name, x + y) for x, y in zip(xs, function(xs), strict=True)]

    def feed_forward(self, name: str, x: Array) -> Array:
        return self.linear(f"{name}.output", np.maximum(self.linear(f"{name}.inner", x), 0))

    def encode(self, source: Sequence[int]) -> list[Array]:
        xs = [self.embed("source_embedding", token, i) for i, token in enumerate(source)]
        for i in range(self.config.encoder_layers):
            name = f"encoder.{i}"
            nodes = [Node(0, 0, list(range(len(xs))), []) for _ in xs]
            xs = self.sub_layer(
                f"{name}.sub_layers.0.norm",
                xs,
                lambda ys, name=name, nodes=nodes: self.self_attention(f"{name}.attention", ys, nodes),
            )
            xs = self.sub_layer(
                f"{name}.sub_layers.1.norm",
                xs,
                lambda ys, name=name: [self.feed_forward(f"{name}.feed_forward", y) for y in ys],
            )
        return [self.layer_norm("encoder_norm", x) for x in xs] if self.config.norm == "pre" else xs

    def self_attention(self, name: str, xs: list[Array], nodes: Sequence[Node]) -> list[Array]:
        projected = [np.split(self.linear(f"{name}.qkv", x), 3) for x in xs]
        q, k, v = ([self.heads(p[i]) for p in projected] for i in range(3))
        out = []
        for n, node in enumerate(nodes):
            heads = []
            for h in range(self.config.heads):
                past = read(q[n][h], [k[m][h] for m in node.past], [v[m][h] for m in node.past])
                if not (self.interaction and node.futures):
                    heads.append(past)
                    continue
                future = sum(
                    share * read(q[n][h], [k[m][h] for m in seen], [v[m][h] for m in seen])
                    for share, seen in node.futures
                )
                heads.append(self.fuse(f"{name}.fusion", h, past, np.asarray(future)))
            out.append(self.linear(f"{name}.output", np.concatenate(heads)))
        return out

    def fuse(self, name: str, head: int, past: Array, future: Array) -> Array:
        weight = self.weights.get(f"{name}.weight", np.float64(self.config.future_weight))
        if self.config.fusion == "tanh":
            return past + weight * np.tanh(future)
        if self.config.fusion == "linear":
            return past + weight * future
        both = np.concatenate([past, future])
        gates = sigmoid(both @ self.weights[f"{name}.projection"][head] + self.weights[f"{name}.bias"][head, 0])
        r, z = np.split(gates, 2)
        return r * past + z * future

    def source_attention(self, name: str, x: Array, encoded: Sequence[Array]) -> Array:
        q = self.heads(self.linear(f"{name}.query", x))
        keys, values = zip(*(np.split(self.linear(f"{name}.kv", e), 2) for e in encoded), strict=True)
        heads = [
            read(q[h], [self.heads(k)[h] for k in keys], [self.heads(v)[h] for v in values])
            for h in range(self.config.heads)
        ]
        return self.linear(f"{name}.output", np.concatenate(heads))

    def log_probs(self, source: Sequence[int], nodes: Sequence[Node], said: Sequence[Array] = ()) -> Array:
        """[node, V]"""
        xs = self.hidden(source, nodes, said)
        logits = np.stack([self.weights["output.weight"][FIRST_PREDICTED:] @ x for x in xs])
        return np.stack([np.concatenate([[-np.inf] * FIRST_PREDICTED, np.log(softmax(row))]) for row in logits])

    def hidden(self, source: Sequence[int], nodes: Sequence[Node], said: Sequence[Array] = ()) -> list[Array]:
        """What the output layer reads of each node; `said` are states of a first pass, which every layer reads."""
        encoded = self.encode(source)
        xs = [self.embed("target_embedding", node.token, node.position) for node in nodes]
        for i in range(self.config.decoder_layers):
            name = f"decoder.{i}"
            xs = self.sub_layer(
                f"{name}.sub_layers.0.norm",
                xs,
                lambda ys, name=name: self.self_attention(f"{name}.attention", ys, nodes),
            )
            xs = self.sub_layer(
                f"{name}.sub_layers.1.norm",
                xs,
                lambda ys, name=name: [self.source_attention(f"{name}.source_attention", y, encoded) for y in ys],
            )
            if said:
                xs = self.sub_layer(
                    f"{name}.state_sub_layer.norm",
                    xs,
                    lambda ys, name=name: [self.source_attention(f"{name}.state_attention", y, said) for y in ys],
                )
            xs = self.sub_layer(
                f"{name}.sub_layers.2.norm",
                xs,
                lambda ys, name=name: [self.feed_forward(f"{name}.feed_forward", y) for y in ys],
            )
        return [self.layer_norm("decoder_norm", x) for x in xs] if self.config.norm == "pre" else xs


def stream_nodes(row: Tensor) -> list[Node]:
    """Two streams of a training example [D, T], direction after direction; an ended one is read to its last token."""
    D, T = row.shape
    return [
        Node(
            int(row[d, t]),
            t,
            [d * T + s for s in range(t + 1)],
            [(1.0, [(1 - d) * T + s for s in range(t + 1) if row[1 - d, s] != PAD])] if D == 2 else [],
        )
        for d in range(D)
        for t in range(T)
    ]


# -- the layers ------------------------------------------------------------------------------------------------------


def rows(x: Tensor) -> list[Array]:
    return list(x.detach().double().numpy())


def lone(name: str, module: torch.nn.Module, heads: int, **config: Any) -> Reference:
    """A reference that knows one module only."""
    reference = object.__new__(Reference)
    reference.weights = {f"{name}.{key}": value.detach().double().numpy() for key, value in module.state_dict().items()}
    options = {"width": 8, "heads": heads, "fusion": "tanh", "future_weight": 0.1, **config}
    reference.config = toy_model(**options).config  # type: ignore[assignment]
    reference.interaction = True
    return reference


def test_self_attention_reads_every_word_and_no_padding() -> None:
    torch.manual_seed(1)
    module = SelfAttention(8, 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    found = module(x, mask[:, None, None, :])
    for b, length in enumerate([5, 3]):
        nodes = [Node(0, 0, list(range(length)), []) for _ in range(length)]
        expected = lone("a", module, 2).self_attention("a", rows(x[b])[:length], nodes)
        torch.testing.assert_close(found[b, :length], torch.tensor(np.stack(expected)))


def test_source_attention_serves_several_rows_of_one_source() -> None:
    torch.manual_seed(2)
    B, R, D, Q, S = 2, 6, 2, 3, 4
    module = SourceAttention(8, 2).double()
    encoded, x = torch.randn(B, S, 8, dtype=torch.float64), torch.randn(R, D, Q, 8, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    found = module(x, *module.remember(encoded), mask[:, None, None, :])
    for r in range(R):
        source = rows(encoded[r // 3])[: int(mask[r // 3].sum())]
        for d in range(D):
            for t in range(Q):
                expected = lone("a", module, 2).source_attention("a", x[r, d, t].numpy(), source)
                torch.testing.assert_close(found[r, d, t], torch.tensor(expected))


def fusion(name: str, heads: int, head_width: int) -> Fusion:
    if name == "gate":
        gate = Gate(heads, head_width, 0.0)
        torch.nn.init.normal_(gate.bias)
        return gate
    return {"tanh": Tanh, "linear": Linear}[name](0.3, name == "tanh", 0.0)


@pytest.mark.parametrize("name", ["tanh", "linear", "gate"])
@pytest.mark.parametrize("partners", [1, 3])
def test_synchronous_attention_with_any_view(name: str, partners: int) -> None:
    """Each query reads some keys of its own direction, and of the other direction some per partner, mixed by weight."""
    torch.manual_seed(3)
    B, D, Q, P = 2, 2, 4, partners
    module = SynchronousAttention(8, 2, fusion(name, 2, 4)).double()
    x = torch.randn(B, D, Q, 8, dtype=torch.float64)
    own = (torch.rand(B, D, Q, Q) < 0.5) | torch.eye(Q, dtype=torch.bool)
    seen = torch.rand(B, D, Q, P, Q) < 0.5  # [reader's direction, reader, partner, key of the other direction]
    seen[..., 0] = True
    weights = torch.rand(B, D, Q, P, dtype=torch.float64)
    has_future = torch.rand(B, D, Q) < 0.7
    mask = torch.cat([own, seen.flip(1).flatten(2, 3)], dim=2).flatten(0, 1)[:, None]
    single = partners == 1
    found = module(x, View(mask, None if single else weights, has_future))
    reference = lone("a", module, 2, fusion=name, future_weight=0.3)
    for b in range(B):
        nodes = [
            Node(
                0,
                0,
                [d * Q + int(m) for m in own[b, d, i].nonzero()],
                [
                    (1.0 if single else float(weights[b, d, i, p]), [(1 - d) * Q + int(m) for m in row.nonzero()])
                    for p, row in enumerate(seen[b, d, i])
                ]
                if has_future[b, d, i]
                else [],
            )
            for d in range(D)
            for i in range(Q)
        ]
        expected = reference.self_attention("a", rows(x[b].flatten(0, 1)), nodes)
        torch.testing.assert_close(found[b].flatten(0, 1), torch.tensor(np.stack(expected)))


@pytest.mark.parametrize("view", ["no mask", "no fusion"])
def test_without_a_future_only_the_past_is_read(view: str) -> None:
    torch.manual_seed(4)
    Q = 4
    module = SynchronousAttention(8, 2, Tanh(5.0, False, 0.0) if view == "no mask" else None).double()
    x = torch.randn(1, 2, Q, 8, dtype=torch.float64)
    causal = torch.ones(Q, Q, dtype=torch.bool).tril().expand(2, 1, Q, Q)
    found = module(x, View(None if view == "no mask" else causal))
    nodes = [Node(0, 0, [d * Q + s for s in range(t + 1)], []) for d in range(2) for t in range(Q)]
    expected = lone("a", module, 2).self_attention("a", rows(x[0].flatten(0, 1)), nodes)
    torch.testing.assert_close(found[0].flatten(0, 1), torch.tensor(np.stack(expected)))


def test_history_grows_and_keeps_every_slot() -> None:
    """Three steps in room for one: nothing is lost when the buffer doubles, and `keep` takes whole sentences."""
    B, D, H, K, d = 2, 2, 1, 2, 3
    history = History.empty((B, D, H, 1, K, d), torch.zeros(0))
    written, clock = torch.randn(3, B, D, H, K, d), Clock.start(torch.device("cpu"))
    for step in range(3):
        if clock.is_full(history.keys.size(3)):
            history = history.roomier(2 * step)
        keys, values = history.write(clock, written[step], -written[step])
        clock = clock.ticked()
    assert torch.equal(keys, torch.cat(list(written), dim=3))
    assert torch.equal(values, -keys)
    kept, _ = history.keep(torch.tensor([1])).write(clock, written[0, 1:], written[0, 1:])
    assert torch.equal(kept, torch.cat([keys[1:], written[0, 1:]], dim=3))


def test_future_dropout_falls_on_the_future_only_and_in_training_only() -> None:
    past, future = torch.randn(2, 2, 1, 40, 4), torch.randn(2, 2, 1, 40, 4)
    module = Linear(1.0, False, 0.5)
    taken = module(past, future) - past
    dropped = taken.abs() < 1e-6
    assert 0.35 < dropped.float().mean() < 0.65
    torch.testing.assert_close(taken[~dropped], 2 * future[~dropped])
    torch.testing.assert_close(module.eval()(past, future), past + future)


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", FAMILIES["transformer"].shapes, ids=str)
@pytest.mark.parametrize("meeting", MEETINGS, ids=str)
def test_teacher_forcing_follows_the_equations(meeting: dict[str, Any], shape: dict[str, Any]) -> None:
    """Streams of different length; two rows per source; padded sources."""
    model = toy_model(seed=5, **{"encoder_layers": 2, **meeting, **shape}).double()
    assert isinstance(model, Transformer)
    sources = toy_sources(5, 2)
    inputs = streams(5, [(4, 2), (1, 3), (4, 4), (0, 2)])
    found = model(pad(sources, 2), inputs)
    for r in range(len(inputs)):
        expected = Reference(model).log_probs(sources[r // 2].tolist(), stream_nodes(inputs[r]))
        real = (inputs[r] != PAD).flatten()
        torch.testing.assert_close(found[r].flatten(0, 1)[real], torch.tensor(expected)[real])


@pytest.mark.parametrize("system", ["transformer-l2r", "transformer-r2l", "no-interaction"])
def test_systems_without_interaction_follow_the_equations(system: str) -> None:
    model = toy_model(system, seed=6).double()
    assert isinstance(model, Transformer)
    sources = toy_sources(6, 2)
    inputs = streams(6, [(4, 2), (1, 3)])
    inputs = {"transformer-l2r": inputs[:, :1], "transformer-r2l": inputs[:, 1:]}.get(system, inputs)
    found = model(pad(sources), inputs)
    for r in range(2):
        expected = Reference(model).log_probs(sources[r].tolist(), stream_nodes(inputs[r]))
        real = (inputs[r] != PAD).flatten()
        torch.testing.assert_close(found[r].flatten(0, 1)[real], torch.tensor(expected)[real])


@pytest.mark.parametrize("shape", FAMILIES["transformer"].shapes, ids=str)
def test_the_asynchronous_model_follows_the_equations(shape: dict[str, Any]) -> None:
    """Each l2r position reads every state of the second stream's tag and tokens, and none of its padding."""
    model = toy_model("abd-transformer", seed=11, **shape).double()
    assert isinstance(model, AsynchronousTransformer)
    first, second = Reference(model.first), Reference(model.first)
    own = {name: value for name, value in Reference(model).weights.items() if name.startswith("decoder")}
    second.weights = {name: value for name, value in first.weights.items() if not name.startswith("decoder")} | own
    sources = toy_sources(11, 2)
    inputs = torch.cat([streams(11, [(4, 2), (1, 6)]), streams(12, [(0, 4), (0, 6)])[:, 1:]], dim=1)
    found = model(pad(sources, 1), inputs)
    for r in range(2):
        alone = [[node for node in stream_nodes(inputs[r, d : d + 1]) if node.token != PAD] for d in range(3)]
        source = sources[r].tolist()
        said = first.hidden(source, alone[1])
        expected = [second.log_probs(source, alone[0], said), *(first.log_probs(source, nodes) for nodes in alone[1:])]
        for d in range(3):
            torch.testing.assert_close(found[r, d, : len(alone[d])], torch.tensor(expected[d]))
        silent = second.log_probs(source, alone[0])  # that the states matter
        assert np.abs(silent[:, FIRST_PREDICTED:] - expected[0][:, FIRST_PREDICTED:]).max() > 0.02


@pytest.mark.parametrize("mixed", [False, True], ids=["one partner", "mixed partners"])
@pytest.mark.parametrize("meeting", MEETINGS, ids=str)
def test_a_decoder_step_follows_the_equations(meeting: dict[str, Any], mixed: bool) -> None:
    """Random hypotheses, parents, partners, shares, halves without a future and hypotheses that consume nothing."""
    model = toy_model(seed=7, **meeting).double()
    assert isinstance(model, Transformer)
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
                chains[b][d][k] = [*chains[b][d][k], len(nodes[b])]
                nodes[b].append(Node(int(tokens[b, d, k]), step, chains[b][d][k], []))
        for b, d, k in newest:
            nodes[b][newest[b, d, k]].futures = [
                (w, chains[b][1 - d][slot])
                for slot, w in zip(partners[b, d, k].tolist(), weights[b, d, k].tolist(), strict=True)
                if w > 0
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


@pytest.mark.parametrize("meeting", MEETINGS[:3], ids=str)
def test_replay_follows_the_equations(meeting: dict[str, Any]) -> None:
    """Any lattice: some nodes have two partners, some none."""
    model = toy_model(seed=8, **meeting).double()
    assert isinstance(model, Transformer)
    torch.manual_seed(8)
    D, N, P = 2, 5, 2
    (source,) = toy_sources(8, 1)
    own = (torch.rand(D, N, N) < 0.5).tril() | torch.eye(N, dtype=torch.bool)
    seen = torch.rand(D, N, P, N) < 0.5
    seen[..., 0] = True
    weights = torch.rand(D, N, P, dtype=torch.float64)
    weights[:, 1] = 0.0
    tokens, positions = torch.randint(4, 9, (D, N)), torch.randint(0, 4, (D, N))
    found = model.replay(model.encode(source[None]), Lattice(tokens, positions, own, seen, weights))
    nodes = [
        Node(
            int(tokens[d, n]),
            int(positions[d, n]),
            [d * N + int(m) for m in own[d, n].nonzero()],
            [
                (float(weights[d, n, p]), [(1 - d) * N + int(m) for m in seen[d, n, p].nonzero()])
                for p in range(P)
                if weights[d, n, p] > 0
            ],
        )
        for d in range(D)
        for n in range(N)
    ]
    expected = Reference(model).log_probs(source.tolist(), nodes)
    torch.testing.assert_close(found.flatten(0, 1), torch.tensor(expected))


@pytest.mark.parametrize("meeting", MEETINGS, ids=str)
def test_the_interaction_changes_what_is_predicted(meeting: dict[str, Any]) -> None:
    """Otherwise every test of it would pass without it."""
    model = toy_model(seed=9, **meeting)
    apart = same_weights(model, "no-interaction", **meeting)
    source, inputs = pad(toy_sources(9, 2)), streams(9, [(4, 4), (3, 4)])
    assert (model(source, inputs) - apart(source, inputs))[..., FIRST_PREDICTED:].abs().max() > 0.02
