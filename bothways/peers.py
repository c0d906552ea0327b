"""Other toolkits' decoders, made ready for the same work as ours (bench.py): a shape in, contenders out.

Each needs a package of the extra `bench`, which is imported only when its peer is asked for.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from bothways.errors import ConfigError
from bothways.models.transformer import Transformer
from bothways.nn.layers import sinusoids
from bothways.tokens import END, PAD, SPECIAL_TOKENS, TAG_L2R, UNKNOWN

MARIAN_TOKENS = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
Decode = Callable[[Sequence[list[int]], int], list[int]]


@dataclass(frozen=True)
class Work:
    """What every contender of one measurement does."""

    shape: str
    device: torch.device
    precision: str  # of ours
    beam: int
    tokens_out: int
    longest: int  # source


@dataclass(frozen=True)
class Contender:
    """A model that is ready to decode."""

    peer: str  # whose it is
    system: str
    dtype: str
    parameters: int
    decode: Decode  # sources, and how many at a time -> how many tokens each source's best output has


def _installed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"against: {package} is not installed; in a checkout: pip install -e '.[bench]'") from None


# -- transformers ------------------------------------------------------------------------------------------------------


def marian_of(model: Transformer, positions: int, **options: Any) -> Any:
    """MarianMT in the shape of a model of ours, with random weights."""
    transformers, config = _installed("transformers"), model.config
    same = transformers.MarianConfig(
        vocab_size=model.output_weight.size(0),
        d_model=config.width,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads,
        decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.feed_forward,
        decoder_ffn_dim=config.feed_forward,
        activation_function="relu",
        dropout=config.dropout,
        scale_embedding=True,
        max_position_embeddings=positions,
        forced_eos_token_id=None,
        **MARIAN_TOKENS,
        **options,
    )
    return transformers.MarianMTModel(same)


def marian_trainer(
    model: Transformer, device: torch.device, precision: str, width: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Updates of MarianMT on sources and targets [B, `width`], compiled on a GPU; the loss is its own, unsmoothed."""
    marian = marian_of(model, width).to(device).train()
    optimizer = torch.optim.AdamW(marian.parameters(), fused=True)
    computed = torch.compile(marian) if device.type == "cuda" else marian

    def update(source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = computed(input_ids=source, attention_mask=(source != PAD).long(), labels=target).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(marian.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _transformers(model: Transformer, work: Work) -> list[Contender]:
    """MarianMT of Hugging Face transformers, as `generate` runs it by default."""
    transformers = _installed("transformers")
    dtype = torch.float32 if work.precision == "float32" else torch.bfloat16
    marian = marian_of(model, work.longest + work.tokens_out).to(work.device, dtype).eval()
    length = {"min_new_tokens": work.tokens_out, "max_new_tokens": work.tokens_out}
    marian.generation_config = transformers.GenerationConfig(
        num_beams=work.beam, length_penalty=0.6, **length, **MARIAN_TOKENS
    )

    def decode(sources: Sequence[list[int]], batch: int) -> list[int]:
        lengths = []
        rows = sorted(([*source, END] for source in sources), key=len)
        for begin in range(0, len(rows), batch):
            part = [torch.tensor(row) for row in rows[begin : begin + batch]]
            padded = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=PAD).to(work.device)
            with torch.inference_mode():
                found = marian.generate(padded, attention_mask=(padded != PAD).long())
            lengths += [len(tokens) - 1 for tokens in found.tolist()]  # less the start token
        return lengths

    parameters = sum(p.numel() for p in marian.parameters())
    return [Contender("transformers", "MarianMT", str(dtype).removeprefix("torch."), parameters, decode)]


# -- CTranslate2 -------------------------------------------------------------------------------------------------------


def _ctranslate2(model: Transformer, work: Work) -> list[Contender]:
    """CTranslate2 with our model's weights; on a CPU in both of its modes, workers x threads of each.

    On a CPU it has no bfloat16: int8 is what it offers to those who want to be faster than float32.
    """
    package = _installed("ctranslate2")
    on_cpu, threads = work.device.type == "cpu", torch.get_num_threads()
    compute = "int8" if on_cpu and work.precision != "float32" else work.precision
    modes = list(dict.fromkeys([(threads, 1), (1, threads)])) if on_cpu else [(1, 0)]
    with tempfile.TemporaryDirectory(prefix="bothways-ctranslate2-") as folder:
        parameters = convert(model, folder, work.longest + work.tokens_out)
        translators = [
            package.Translator(
                folder, device=work.device.type, inter_threads=workers, intra_threads=each, compute_type=compute
            )
            for workers, each in modes
        ]

    def contender(mode: tuple[int, int], translator: Any) -> Contender:
        def decode(sources: Sequence[list[int]], batch: int) -> list[int]:
            found = translator.translate_batch(
                [[word(i) for i in [*source, END]] for source in sources],
                max_batch_size=batch,
                beam_size=work.beam,
                length_penalty=0.6,
                min_decoding_length=work.tokens_out,
                max_decoding_length=work.tokens_out,
            )
            return [len(one.hypotheses[0]) for one in found]

        system = f"Transformer {mode[0]}x{mode[1]}" if on_cpu else "Transformer"
        return Contender("ctranslate2", system, compute, parameters, decode)

    return [contender(mode, translator) for mode, translator in zip(modes, translators, strict=True)]


def word(token: int) -> str:
    """The text that CTranslate2 has for one of our tokens."""
    return SPECIAL_TOKENS[token] if token < len(SPECIAL_TOKENS) else str(token)


def convert(model: Transformer, folder: str, positions: int) -> int:
    """Write a Transformer of ours as CTranslate2 reads it; returns its number of weights.

    The two compute the same, but that CTranslate2 may also predict padding and tags.
    """
    specs, config = _installed("ctranslate2").specs, model.config
    if config.share_embeddings != "all" or model.interaction:
        raise ConfigError("against: ctranslate2 decodes one direction, with model.share_embeddings=all")
    layers = (config.encoder_layers, config.decoder_layers)
    spec = specs.TransformerSpec.from_config(layers, config.heads, pre_norm=config.norm == "pre")
    encodings = sinusoids(torch.arange(positions), config.width, torch.float32).numpy()
    for side, ours, norm in (
        (spec.encoder, model.encoder, model.encoder_norm),
        (spec.decoder, model.decoder, model.decoder_norm),
    ):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _numbers(model.target_embedding.weight)
        side.scale_embeddings = True
        side.position_encodings.encodings = encodings
        for its, layer in zip(side.layer, ours, strict=True):
            _copy_layer(its, layer)
        if config.norm == "pre":
            _copy_norm(side.layer_norm, norm)
    spec.decoder.projection.weight = _numbers(model.output_weight)
    words = [word(i) for i in range(model.output_weight.size(0))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.decoder_start_token = spec.config.bos_token = words[TAG_L2R]
    spec.config.eos_token, spec.config.unk_token = words[END], words[UNKNOWN]
    spec.validate()
    spec.optimize()  # finds shared matrices, which count once
    spec.save(folder)
    # Shared matrices are named once more as text, settings are single numbers, and positions are no weights.
    shapes = {name: getattr(value, "shape", ()) for name, value in spec.variables().items() if "encodings" not in name}
    return sum(math.prod(shape) for shape in shapes.values() if len(shape))


def _copy_layer(its: Any, layer: Any) -> None:
    pairs: list[tuple[Any, ...]] = [(its.self_attention, layer.attention.qkv, layer.attention.output)]
    if hasattr(layer, "source_attention"):
        cross = layer.source_attention
        pairs.append((its.attention, cross.query, cross.kv, cross.output))
    for attention, *products in pairs:
        for one, ours in zip(attention.linear, products, strict=True):
            _copy_linear(one, ours)
    _copy_linear(its.ffn.linear_0, layer.feed_forward.inner)
    _copy_linear(its.ffn.linear_1, layer.feed_forward.output)
    for part, sub_layer in zip([*(attention for attention, *_ in pairs), its.ffn], layer.sub_layers, strict=True):
        _copy_norm(part.layer_norm, sub_layer.norm)


def _copy_linear(its: Any, ours: Any) -> None:
    its.weight, its.bias = _numbers(ours.weight), _numbers(ours.bias)


def _copy_norm(its: Any, ours: Any) -> None:
    its.gamma, its.beta = _numbers(ours.weight), _numbers(ours.bias)


def _numbers(x: torch.Tensor) -> Any:
    return x.detach().float().cpu().numpy()


PEERS: dict[str, Callable[[Transformer, Work], list[Contender]]] = {
    "transformers": _transformers,
    "ctranslate2": _ctranslate2,
}
