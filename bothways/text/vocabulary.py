"""Text <-> ids: subwords (byte-level BPE over the `tokenizers` library) or whitespace words.

The ids 0..4 are the special tokens of `tokens.py`; no text is ever encoded to them, except that a word outside a word
vocabulary is `<unk>`. Ids are in reading order, without end mark and tags.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer

from bothways.errors import ConfigError, DataError, VocabularyError
from bothways.tokens import SPECIAL_TOKENS, UNKNOWN

# Said aloud, or `tokenizers` warns and goes serial when a process that has encoded something forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

FORMAT = "bothways vocabulary 1"
FIRST = len(SPECIAL_TOKENS)  # the first id of a token of the text
SMALLEST = FIRST + 256  # special tokens and bytes: any subword vocabulary has them

# No subword crosses these borders: a word (with its accents, its apostrophes and the space before it), one digit, other
# signs, white space. What matches nothing stands alone, so that nothing is lost.
BORDERS = r" ?[\p{L}\p{M}]+(?:['’][\p{L}\p{M}]+)*|\p{Nd}| ?[^\s\p{L}\p{M}\p{Nd}]+|\s+(?!\S)|\s+"

# Every text begins with one space more, taken off again by `decode`: a word is the same token at the start of a text
# and inside it, and so a prefix or suffix of a translation is encoded as it would be in place.
MARK = " "

LINES_AT_ONCE = 10_000
CHARACTERS_AT_ONCE = 4_000_000


def _byte_letters() -> list[str]:
    """The letter that stands for each byte inside `tokenizers`: printable Latin-1 for itself, others from U+0100 on.

    Space and line feed are not among them, so tokens and merges can be written side by side in a text file.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


LETTERS = _byte_letters()
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


class Vocabulary:
    """What both ends of a model agree on: which id stands for which piece of text."""

    kind: Literal["subwords", "words"]
    tokens: tuple[str, ...]  # from id 5 on; subwords are spelled in the letters of their bytes
    merges: tuple[tuple[str, str], ...]  # of subwords, in the order learned; empty for words

    def __init__(
        self, kind: Literal["subwords", "words"], tokens: Iterable[str], merges: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.kind = kind
        self.tokens = tuple(tokens)
        self.merges = tuple(merges)
        self.serialized = self._serialize()
        self.fingerprint = hashlib.sha256(self.serialized.encode()).hexdigest()[:16]
        self._ids = {token: FIRST + i for i, token in enumerate(self.tokens)}
        if len(self._ids) < len(self.tokens):
            raise VocabularyError("a token stands twice in the vocabulary")
        if kind == "subwords":
            self._tokenizer, self._parts = self._segmentation()
            # The line feed is a byte like any other, but never in a line of text: a model that makes one up anyway must
            # not break its hypothesis into two lines.
            spelled = (bytes(BYTES[letter] for letter in token) for token in self.tokens)
            self._bytes = [b""] * FIRST + [token.replace(b"\n", b" ") for token in spelled]

    @classmethod
    def learn_subwords(cls, lines: Iterable[str], size: int, keep: int | None = None) -> "Vocabulary":
        """Byte-level BPE of at most `size` tokens (fewer if the text has no more pairs that occur twice).

        `size` counts the special tokens and the 256 bytes. Each digit is a token of its own. With `keep`, only that
        many tokens stay, counted likewise: the most frequent ones in `lines`; any other is split into the two tokens
        it was merged from, and so on down to bytes, which always stay.
        """
        for option, value in (("vocab", size), ("keep", keep)):
            if value is not None and value < SMALLEST:
                least = f"{SMALLEST} for subwords ({FIRST} special tokens and 256 bytes)"
                raise ConfigError(f"{option} must be at least {least}, got {value}")
        if keep is not None and keep > size:
            raise ConfigError(f"keep must be at most vocab ({size}), got {keep}")
        if keep is not None and isinstance(lines, Iterator):
            lines = list(lines)  # read twice: to learn, then to count
        learner = Tokenizer(BPE())
        learner.pre_tokenizer = _borders()
        trainer = BpeTrainer(
            vocab_size=size - FIRST, min_frequency=2, initial_alphabet=sorted(LETTERS), show_progress=False
        )
        learner.train_from_iterator(([MARK + line for line in some] for some in chunks(lines)), trainer)
        merges = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]
        full = cls("subwords", _tokens_of(merges), merges)
        return full if keep is None or keep >= full.size else full._cut(lines, keep)

    @classmethod
    def learn_words(cls, lines: Iterable[str], size: int) -> "Vocabulary":
        """The `size` most frequent words between white space (of equally frequent ones the first by code point).

        Here `size` counts words only; with the special tokens there are five ids more.
        """
        if size < 1:
            raise ConfigError(f"vocab must be at least 1, got {size}")
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
        return cls("words", sorted(counts, key=lambda word: (-counts[word], word))[:size])

    @property
    def size(self) -> int:
        """How many ids there are, special tokens included (V)."""
        return FIRST + len(self.tokens)

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without end mark."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        if self.kind == "words":
            return [[self._ids.get(word, UNKNOWN) for word in text.split()] for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast([MARK + text for text in texts], add_special_tokens=False)
        except TypeError:
            for text in texts:
                if isinstance(text, str) and (surrogate := re.search("[\ud800-\udfff]", text)):
                    raise DataError(
                        f"text holds the lone surrogate {surrogate[0]!a} at position {surrogate.start()}; "
                        "it must be Unicode that UTF-8 can hold"
                    ) from None
            raise
        found: list[list[int]] = [encoding.ids if text else [] for encoding, text in zip(encodings, texts, strict=True)]
        if self._parts:
            size, parts = self.size, self._parts
            return [[part for i in ids for part in ([i] if i < size else parts[i - size])] for ids in found]
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens are skipped, but an unknown word is shown: leaving it out would hide it."""
        if self.kind == "words":
            return " ".join(self._spell(i) for i in ids if i >= UNKNOWN)
        return b"".join([self._bytes[i] for i in ids]).decode("utf-8", errors="replace").removeprefix(MARK)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each id as a person can read it: `▁` for a space, `<0xE2>` for a byte that is not a character by itself."""
        return [self._spell(i) for i in ids]

    def save(self, path: str | Path) -> None:
        """Write to a JSON file; a file of that name is replaced at once or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("w", encoding="utf-8", newline="\n") as file:
                file.write(self.serialized)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise VocabularyError(f"{path}: cannot be written: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise VocabularyError(f"{path}: no such vocabulary file") from None
        except OSError as error:
            raise VocabularyError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # not JSON, or not even UTF-8
            raise VocabularyError(f"{path}: is damaged: not JSON: {error}") from None
        try:
            return cls._deserialize(content)
        except (VocabularyError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise VocabularyError(f"{path}: is not a vocabulary, or damaged: {type(error).__name__}: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Vocabulary({self.kind}, {self.size} tokens, {self.fingerprint})"

    def __getstate__(self) -> str:
        return self.serialized

    def __setstate__(self, state: str) -> None:
        self.__dict__.update(self._deserialize(json.loads(state)).__dict__)

    def _serialize(self) -> str:
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "special_tokens": SPECIAL_TOKENS,
            "tokens": self.tokens,
            "merges": [f"{left} {right}" for left, right in self.merges],
        }
        return json.dumps(content, ensure_ascii=False, indent=0) + "\n"

    @classmethod
    def _deserialize(cls, content: Any) -> "Vocabulary":
        """From the parsed file; whatever is wrong with it raises one of the errors that `load` expects."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise VocabularyError(f"the key `format` must be {FORMAT!r}")
        if content["special_tokens"] != list(SPECIAL_TOKENS):
            raise VocabularyError(f"its special tokens must be {' '.join(SPECIAL_TOKENS)}")
        kind, tokens = content["kind"], content["tokens"]
        if kind not in ("subwords", "words") or not all(isinstance(token, str) for token in tokens):
            raise VocabularyError("`kind` must be subwords or words, and `tokens` a list of texts")
        merges = []
        for merge in content["merges"]:
            left, right = merge.split(" ")
            merges.append((left, right))
        if kind == "subwords" and (tokens[:256] != LETTERS or not set(tokens) <= set(_tokens_of(merges))):
            raise VocabularyError("its tokens do not follow from its merges")
        return cls(kind, tokens, merges)

    def _segmentation(self) -> tuple[Tokenizer, list[list[int]]]:
        """The segmenter, and for each token that was cut (their ids go on from `size`) the tokens it is split into."""
        cut = [token for token in _tokens_of(self.merges) if token not in self._ids]
        ids = self._ids | {token: self.size + i for i, token in enumerate(cut)}
        tokenizer = Tokenizer(BPE(ids, list(self.merges)))
        tokenizer.pre_tokenizer = _borders()
        origins: dict[str, tuple[str, str]] = {}
        for left, right in self.merges:
            origins.setdefault(left + right, (left, right))
        parts: dict[str, list[int]] = {token: [i] for token, i in self._ids.items()}
        for token in cut:  # in the order they were merged: the parts of a token come before it
            left, right = origins[token]
            parts[token] = parts[left] + parts[right]
        return tokenizer, [parts[token] for token in cut]

    def _cut(self, lines: Iterable[str], keep: int) -> "Vocabulary":
        """The same merges, but only all bytes and the most frequent tokens stay (of equal ones the earlier merged)."""
        counts = Counter[int]()
        for some in chunks(lines):
            for ids in self.encode_batch(some):
                counts.update(ids)
        merged = sorted(range(SMALLEST, self.size), key=lambda i: (-counts[i], i))
        kept = sorted(merged[: keep - SMALLEST])
        return Vocabulary("subwords", LETTERS + [self.tokens[i - FIRST] for i in kept], self.merges)

    def _spell(self, i: int) -> str:
        if i < FIRST:
            return SPECIAL_TOKENS[i]
        if self.kind == "words":
            return self.tokens[i - FIRST]
        spelled = bytes(BYTES[letter] for letter in self.tokens[i - FIRST])
        try:
            return spelled.decode("utf-8").replace(" ", "▁")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in spelled)


def chunks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Lines by the thousand: enough to keep all cores busy, and few enough that long ones do not fill the memory."""
    chunk: list[str] = []
    characters = 0
    for line in lines:
        chunk.append(line)
        characters += len(line)
        if len(chunk) >= LINES_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _borders() -> PreTokenizer:
    return Steps([Split(Regex(BORDERS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


def _tokens_of(merges: Iterable[tuple[str, str]]) -> list[str]:
    """All bytes and what is merged from them, each once (two merges can make the same token)."""
    return list(dict.fromkeys([*LETTERS, *(left + right for left, right in merges)]))
