"""Everything bothways raises on purpose: one line that a person can act on.

    BothwaysError
    ├── ConfigError        an option is unknown, has the wrong type or an impossible value
    ├── DataError          a text, a corpus or a prepared folder is not what it must be
    ├── VocabularyError    texts or runs meet that do not share a vocabulary
    ├── CheckpointError    a run or checkpoint is missing, damaged or of another shape
    └── SearchError        a model is asked for what it cannot decode

The command line prints the message without a traceback and exits with status 2. `assert` is for our own mistakes.
"""


class BothwaysError(Exception):
    """The root: `except BothwaysError` catches all of these and nothing else."""


class ConfigError(BothwaysError):
    """An option is unknown, has the wrong type or an impossible value."""


class DataError(BothwaysError):
    """A text, a corpus or a prepared folder is not what it must be."""


class VocabularyError(BothwaysError):
    """Texts or runs meet that do not share a vocabulary."""


class CheckpointError(BothwaysError):
    """A run or checkpoint is missing, damaged or of another shape."""


class SearchError(BothwaysError):
    """A model is asked for what it cannot decode."""
