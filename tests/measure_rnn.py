"""Training speed of the LSTM family beside a plain PyTorch decoder of the same shape: `python tests/measure_rnn.py`.

Both have the encoder in cuDNN, input feeding, additive attention, residual connections, layer normalization and
dropout, the same loss, optimizer and precision (bfloat16 on a GPU). The plain one is written as one would: an
`LSTMCell` for every layer and token, run eagerly. Ours is recorded where `bothways train` records. They take turns on
the same made-up batches; the figure is the median, in target tokens (with end marks) that bear a loss per second.

First it is made sure that a GPU's gradients, cells fused and passes recorded, are those of a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways.config import ModelConfig, parse
from bothways.data.batch import Batch
from bothways.models.table import build, resolve
from bothways.tokens import END, SPECIAL_TOKENS, TAG_L2R, TAG_R2L
from bothways.train.loss import Objective
from bothways.train.recording import Recorder

SMOOTHING, CLIP = 0.1, 1.0
OURS = ("rnmt-l2r", "rnmt-no-interaction", "bi-rnmt")


class Plain(nn.Module):
    """One direction, as written without a thought for speed; sentences of one length, so nothing is masked."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        E, self.dropout = config.width, nn.Dropout(config.dropout)
        self.embedding = nn.Embedding(vocabulary, E)
        self.first = nn.LSTM(E, E, batch_first=True, bidirectional=True)
        self.upper = nn.ModuleList(nn.LSTM(E, E, batch_first=True) for _ in range(config.encoder_layers - 1))
        self.join, self.begin = nn.Linear(2 * E, E), nn.Linear(E, config.decoder_layers * E)
        self.cells = nn.ModuleList(nn.LSTMCell(E if i else 2 * E, E) for i in range(config.decoder_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(config.encoder_layers + config.decoder_layers))
        self.query, self.key = nn.Linear(E, E, bias=False), nn.Linear(E, E, bias=False)
        self.v, self.combine = nn.Linear(E, 1, bias=False), nn.Linear(2 * E, E, bias=False)

    def forward(self, source: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Sources [B, S], inputs and labels [B, T] -> the summed loss."""
        norms = iter(self.norms)
        x = next(norms)(self.dropout(torch.tanh(self.join(self.first(self.dropout(self.embedding(source)))[0]))))
        for lstm in self.upper:
            x = next(norms)(x + self.dropout(lstm(x)[0]))
        keys, above = self.key(x), list(norms)
        h = list(torch.tanh(self.begin(x[:, -1])).chunk(len(self.cells), dim=-1))
        c = [torch.zeros_like(h[0]) for _ in h]
        z, outputs, words = torch.zeros_like(h[0]), [], self.dropout(self.embedding(inputs))
        for i in range(inputs.size(1)):
            top = torch.cat([words[:, i], z], dim=-1)
            for n, (cell, norm) in enumerate(zip(self.cells, above, strict=True)):
                h[n], c[n] = cell(top, (h[n], c[n]))
                top = norm(top + self.dropout(h[n]) if n else self.dropout(h[n]))
            shares = torch.softmax(self.v(torch.tanh(self.query(top)[:, None] + keys)).squeeze(-1), dim=-1)
            context = (shares[:, None].to(x.dtype) @ x).squeeze(1)
            z = self.dropout(torch.tanh(self.combine(torch.cat([top, context], dim=-1))))
            outputs.append(z)
        logits = torch.stack(outputs, dim=1).flatten(0, 1) @ self.embedding.weight.T
        return F.cross_entropy(logits.float(), labels.flatten(), label_smoothing=SMOOTHING, reduction="sum")


def batch_of(system: str, sentences: int, length: int, vocabulary: int) -> Batch:
    """Made-up sentences of one length; for a model with interaction, triples."""
    draw = np.random.default_rng(sentences)
    rows, sides = (2 if system == "bi-rnmt" else 1), (1 if system == "rnmt-l2r" else 2)
    source, streams = (
        draw.integers(len(SPECIAL_TOKENS), vocabulary, shape)
        for shape in ((sentences, length), (rows * sentences, sides, length))
    )
    source[:, -1] = streams[..., -1] = END
    weights = np.ones(streams.shape[:2])
    if rows == 2:
        weights[0::2, 1] = weights[1::2, 0] = 0
    return Batch.of_streams(source, streams, (TAG_L2R, TAG_R2L)[:sides], weights, fill=True)


def trainer(
    model: nn.Module, compute: Callable[[Batch, Tensor], Tensor], batch: Batch, records: bool
) -> Callable[[], None]:
    """One update of a model: forward, backward, clipping, Adam."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    factor = 1 / batch.loss_tokens

    def step(place: Batch, factor: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = compute(place, factor)
        (loss * factor).backward()
        return loss.detach(), loss.detach()

    recorder = Recorder(step, model, device) if records else None
    place = batch.pin() if records else batch.to(device)
    if recorder is not None:
        recorder.prepare(place)

    def update() -> None:
        if recorder is not None:
            recorder.clear()
            recorder.replay(place, factor)
        else:
            optimizer.zero_grad(set_to_none=True)
            step(place, torch.tensor(factor))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return update


def check(device: torch.device) -> None:
    """The gradients of small models in float32, on this device as they are trained there, against a CPU's."""
    for system in OURS:
        options = {"preset": "tiny", "decoder_layers": 2, "encoder_layers": 2, "dropout": 0.0}
        config = resolve(parse({"system": system, "data": "-", "model": options}))
        batch = batch_of(system, 3, 7, 50)
        found = []
        for place in (torch.device("cpu"), device):
            torch.manual_seed(1)
            model = build(config, 50, 50).to(place).train()
            objective = Objective(model, SMOOTHING)

            def compute(part: Batch, factor: Tensor, objective: Objective = objective) -> tuple[Tensor, Tensor]:
                loss, likelihood = objective(part)
                (loss * factor).backward()
                return loss.detach(), likelihood

            if place.type == "cuda":
                recorder = Recorder(compute, model, place)
                recorder.prepare(batch)
                recorder.clear()
                recorder.replay(batch, 1.0)
            else:
                compute(batch, torch.ones(()))
            found.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]))
        apart = float((found[1] - found[0]).norm() / found[0].norm())
        print(f"{system}: gradients on {device.type} differ from a CPU's by {apart:.1e} of their norm", flush=True)
        assert apart < 1e-3


def seconds(update: Callable[[], None], device: torch.device, updates: int) -> float:
    """Of one update, over several."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(updates):
        update()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / updates


def measure(tokens: int, options: argparse.Namespace, device: torch.device) -> None:
    """A line for every system at this many target tokens an update."""
    contenders: dict[str, tuple[Callable[[], None], float]] = {}
    sentences = max(1, tokens // options.length)
    for system in ("plain", *OURS):
        ours = "rnmt-l2r" if system == "plain" else system
        # Both streams of a sentence bear a loss, so half as many sentences are as many tokens.
        batch = batch_of(ours, sentences if ours == "rnmt-l2r" else -(-sentences // 2), options.length, options.vocab)
        config = resolve(parse({"system": ours, "data": "-", "model": {"preset": options.preset}}))
        torch.manual_seed(1)
        if system == "plain":
            plain = Plain(config.model, options.vocab).to(device).train()
            labels = batch.labels.view(sentences, -1).to(device)
            source, inputs = batch.source.to(device), batch.inputs[:, 0].to(device)
            update = trainer(plain, lambda *_, m=plain, x=(source, inputs, labels): m(*x), batch, False)  # type: ignore[misc]
        else:
            model = build(config, options.vocab, options.vocab).to(device).train()
            objective = Objective(model, SMOOTHING, options.compile)
            update = trainer(model, lambda b, _, o=objective: o(b)[0], batch, device.type == "cuda")  # type: ignore[misc]
        contenders[system] = (update, batch.loss_tokens)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.repeats + 1):
        for name, (update, _) in contenders.items():
            taken = seconds(update, device, options.updates)
            if repeat:  # the first time is for warming up
                times[name].append(taken)
    speeds = {name: contenders[name][1] / statistics.median(taken) for name, taken in times.items()}
    for name, taken in times.items():
        spread = (max(taken) - min(taken)) / statistics.median(taken)
        print(
            f"{tokens:6,} tokens an update  {name:20} {speeds[name]:12,.0f} tokens/s  "
            f"{speeds[name] / speeds['plain']:5.2f} of plain  spread {spread:.0%}",
            flush=True,
        )


def main() -> None:
    """Several sizes of an update, on the GPU if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 8_192, 16_384], help="target tokens an update")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sentence, end mark included")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--updates", type=int, default=10, help="updates that are timed together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="train.compile: ours only")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.preset} on {name}, torch {torch.__version__}, {'bfloat16' if device.type == 'cuda' else 'float32'}"
    )
    check(device)
    for tokens in options.tokens:
        measure(tokens, options, device)


if __name__ == "__main__":
    main()
