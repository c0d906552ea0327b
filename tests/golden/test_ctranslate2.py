"""Our Transformer with its weights in CTranslate2: another program computes the same. Needs the extra `bench`."""

from pathlib import Path

import pytest
import torch
from toy import norm, settings, toy_model, toy_sources

from bothways.models.transformer import Transformer
from bothways.peers import convert, word
from bothways.tokens import DIRECTIONS, PAD, TAG_L2R, TAG_R2L
from bothways.translator import decode

ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.mark.parametrize("form", ["post", "pre"])
@pytest.mark.parametrize("beam", [1, 4])
def test_ctranslate2_finds_what_we_find(tmp_path: Path, form: str, beam: int) -> None:
    model = toy_model("transformer-l2r", seed=4, norm=form, share_embeddings="all")
    assert isinstance(model, Transformer)
    assert convert(model, str(tmp_path), 40) == model.parameter_count()
    sources = toy_sources(6, 12)
    translator = ctranslate2.Translator(str(tmp_path), intra_threads=1)
    theirs = translator.translate_batch(
        [[word(i) for i in source.tolist()] for source in sources],
        beam_size=beam,
        length_penalty=0,
        min_decoding_length=0,
        max_decoding_length=12,
        patience=20,  # goes on as long as our search does
        suppress_sequences=[[word(i)] for i in (PAD, TAG_L2R, TAG_R2L)],
        return_scores=True,
    )
    config = settings(direction="l2r", beam=beam, greedy=beam == 1, length_penalty=0.0, max_length=11)
    ours = dict(decode(model, [s[:-1].tolist() for s in sources], DIRECTIONS["l2r"], config, torch.device("cpu")))
    complete = 0
    for i, one in enumerate(theirs):
        best, words = ours[i].hypotheses[0], one.hypotheses[0]
        assert beam > 1 or words[:11] == [word(token) for token in best.tokens]
        if len(words) == 12:  # at the limit it hands out what has no end, where we prefer what has one
            continue
        complete += 1
        assert words == [word(token) for token in best.tokens]
        assert one.scores[0] == pytest.approx(best.score * norm(len(best.tokens) + 1, config), abs=1e-4)
    assert complete
