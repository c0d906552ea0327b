"""The definition that the fast search is tested against: slow, obvious, one sentence, plain Python floats.

`naive` is the same search without a cache, a batch or a tensor: it asks for the distributions of the newest slots,
given everything that was ever consumed. `enumerate_all` knows no search at all.
"""

from collections.abc import Callable, Sequence
from math import exp, inf

import torch
from torch import Tensor

from bothways.config import SearchConfig
from bothways.search.hypothesis import End, Found, Hypothesis, Trace, TraceStep, length_norm, order_key
from bothways.tokens import END, PAD, Direction

# Everything consumed so far -> log-probabilities [direction][slot][token] of what the newest step's slots choose next.
Distributions = Callable[[Sequence[TraceStep]], list[list[list[float]]]]


def naive(distributions: Distributions, limit: int, directions: tuple[Direction, ...], config: SearchConfig) -> Found:
    """Beam search of one sentence, straight from its description (not greedy, nothing forced)."""
    K = config.beam // len(directions)
    tokens = [[d.tag] * K for d in directions]
    parents = [list(range(K)) for _ in directions]
    chosen = [[0.0] * K for _ in directions]
    scores = [[0.0] + [-inf] * (K - 1) for _ in directions]
    paths: list[list[tuple[list[int], list[float]]]] = [[([], [])] * K for _ in directions]
    steps: list[TraceStep] = []
    complete: list[tuple[Hypothesis, End]] = []
    for t in range(limit + 1):
        cut_off = _cut_off(paths, scores, t, directions, config)
        partners, weights = _partners(scores, config.pairing)
        live = [[score > -inf for score in half] for half in scores]
        steps.append(TraceStep(tokens, parents, chosen, live, partners, weights))
        rows = distributions(steps)
        halves = []
        for d, direction in enumerate(directions):
            candidates = [
                (scores[d][k] + row[v], k, v, row[v])
                for k, row in enumerate(rows[d])
                for v in range(len(row))
                if scores[d][k] + row[v] > -inf
            ]
            candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * K]
            for total, k, v, log_prob in candidates:
                if v == END:
                    path, path_scores = paths[d][k]
                    score = total / float(length_norm(t + 1, config.length_penalty))
                    hypothesis = Hypothesis(path, [*path_scores, log_prob], score, direction, False)
                    complete.append((hypothesis, End(t, direction, k, log_prob)))
            halves.append([c for c in candidates if c[2] != END][:K])
        for d, half in enumerate(halves):
            old, gap = paths[d], K - len(half)
            paths[d] = [([*old[k][0], v], [*old[k][1], p]) for _, k, v, p in half] + [([], [])] * gap
            scores[d] = [total for total, *_ in half] + [-inf] * gap
            tokens = [*tokens[:d], [v for _, _, v, _ in half] + [PAD] * gap, *tokens[d + 1 :]]
            parents = [*parents[:d], [k for _, k, _, _ in half] + [0] * gap, *parents[d + 1 :]]
            chosen = [*chosen[:d], [p for *_, p in half] + [-inf] * gap, *chosen[d + 1 :]]
        complete = sorted(complete, key=lambda pair: order_key(pair[0].score, pair[1]))
        if config.early_stop and _nothing_can_enter(complete, scores, limit, config):
            break
    live = [[score > -inf for score in half] for half in scores]
    nobody: list[list[list[int]]] = [[[]] * K for _ in directions]
    steps.append(TraceStep(tokens, parents, chosen, live, nobody, [[[]] * K for _ in directions]))
    if t < limit:
        cut_off = _cut_off(paths, scores, t + 1, directions, config)
    best: dict[Direction, Hypothesis] = {}
    for hypothesis in [*(found for found, _ in complete), *cut_off]:
        best.setdefault(hypothesis.direction, hypothesis)
    winners = [found for found, _ in complete[: config.beam]] or sorted(cut_off, key=lambda h: -h.score)[:1]
    return Found(winners[: config.nbest], best, Trace(steps, [end for _, end in complete]))


def enumerate_all(distribution: Callable[[Sequence[int]], Sequence[float]], limit: int) -> dict[tuple[int, ...], float]:
    """Log-probability of every sequence of at most `limit` tokens and its end mark, from each prefix' distribution."""
    found: dict[tuple[int, ...], float] = {}
    prefixes: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(limit + 1):
        longer = []
        for prefix, log_prob in prefixes:
            for token, step in enumerate(distribution(prefix)):
                if token == END:
                    found[prefix] = log_prob + step
                elif step > -inf:
                    longer.append(((*prefix, token), log_prob + step))
        prefixes = longer
    return found


def lattice(steps: Sequence[TraceStep]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A trace as one node per step and slot: tokens, positions, own, seen and weights of `models.interface.Lattice`."""
    D, K, N = len(steps[0].tokens), len(steps[0].tokens[0]), len(steps) * len(steps[0].tokens[0])
    forebears: list[list[set[int]]] = [[] for _ in range(D)]  # [direction][node]: itself and all it descends from
    for t, step in enumerate(steps):
        for d in range(D):
            for k in range(K):
                parent = forebears[d][(t - 1) * K + step.parents[d][k]] if t else set()
                forebears[d].append(parent | {t * K + k} if step.tokens[d][k] != PAD else parent)
    P = max((len(p) for step in steps for half in step.partners for p in half), default=0) or 1
    own = torch.zeros(D, N, N, dtype=torch.bool)
    seen = torch.zeros(D, N, P, N, dtype=torch.bool)
    weights = torch.zeros(D, N, P, dtype=torch.float64)
    for t, step in enumerate(steps):
        for d in range(D):
            for k in range(K):
                node = t * K + k
                own[d, node, list(forebears[d][node])] = True
                for p, (slot, weight) in enumerate(zip(step.partners[d][k], step.weights[d][k], strict=True)):
                    seen[d, node, p, list(forebears[1 - d][t * K + slot])] = True
                    weights[d, node, p] = weight
    tokens = torch.tensor([[token for step in steps for token in step.tokens[d]] for d in range(D)])
    positions = torch.arange(len(steps)).repeat_interleave(K).expand(D, N)
    return tokens, positions, own, seen, weights


def _partners(scores: list[list[float]], pairing: str) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """Whose future each slot reads, and how much of it."""
    if len(scores) == 1:
        return [[[] for _ in scores[0]]], [[[] for _ in scores[0]]]
    partners: list[list[list[int]]] = []
    weights: list[list[list[float]]] = []
    for d, half in enumerate(scores):
        other = scores[1 - d]
        some = any(score > -inf for score in other)
        if pairing == "mix":
            mass = [exp(score) for score in other]
            partners.append([list(range(len(other))) for _ in half])
            weights.append([[m / sum(mass) for m in mass] if some else [0.0] * len(other) for _ in half])
        else:
            by_rank = pairing == "rank"
            partners.append([[k if by_rank and other[k] > -inf else 0] for k in range(len(half))])
            weights.append([[1.0 if some else 0.0] for _ in half])
    return partners, weights


def _cut_off(
    paths: list[list[tuple[list[int], list[float]]]],
    scores: list[list[float]],
    length: int,
    directions: tuple[Direction, ...],
    config: SearchConfig,
) -> list[Hypothesis]:
    """The best live hypothesis of each direction, if it has one, none being longer than the maximum length."""
    norm = float(length_norm(length, config.length_penalty))
    return [
        Hypothesis(*paths[d][0], scores[d][0] / norm, direction, True)
        for d, direction in enumerate(directions)
        if scores[d][0] > -inf
    ]


def _nothing_can_enter(
    complete: list[tuple[Hypothesis, End]], scores: list[list[float]], limit: int, config: SearchConfig
) -> bool:
    if len(complete) < config.nbest:
        return False
    nth = complete[config.nbest - 1][0].score
    reachable = max(score for half in scores for score in half) / float(length_norm(limit + 1, config.length_penalty))
    return not reachable > nth
