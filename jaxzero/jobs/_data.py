"""Make tokenised training pairs from any tree of Python files, and choose their order.

Every documented function is a free example of "find the code that does this": its docstring is the
description, its body without the docstring is the code. The name and the signature are left out,
for they would give the answer away. The default tree is the standard library of the Python that
runs the job, so no data has to be downloaded.

The order of the pairs and the split into training and held-out depend on the files alone: files are
visited in sorted order, and a *module* (all functions of one file) is held out as a whole by a
hash of its path. Functions of one file resemble each other, so a split by function would
leak.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import sysconfig
import textwrap
import tokenize
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from rich.console import Console

from .._zero import Zero
from ._settings import Optimization

_SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "testing", "tests"}
)
_MIN_DESCRIPTION_WORDS = 3  # fewer repeat the name of the function
_MIN_CODE_CHARACTERS = 40  # leaves out `pass`, `...`, `return self._name`
HELD_OUT_SHARE = 8  # one file in so many is held out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A training example from one function: its docstring (description) and its body (code)."""

    description: str
    code: str
    module: str  # path relative to the tree, with forward slashes
    line: int  # of the `def`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a tree of files: those to train on, and those held out for evaluation."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]


def standard_library() -> Path:
    """Return the folder of the standard library of the Python that is running."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_pairs(directory: Path) -> Pairs:
    """Read every Python file under `directory` and split its documented functions by module.

    A description or a body that occurs twice is kept once: a copy among the in-batch negatives
    would be punished as wrong although it is right, and a copy across the split would leak.

    Raises:
        ValueError: `directory` is not a directory, or holds too few documented functions to split.
    """
    if not directory.is_dir():
        raise ValueError(
            f"`data` must be a directory of Python files; {str(directory)!r} is not a directory. "
            "Leave it out to use the standard library."
        )
    train, held_out = [], []
    seen = set()
    for path in python_files(directory):
        module = path.relative_to(directory).as_posix()
        side = held_out if is_held_out(module) else train
        for pair in pairs_in(_read(path), module):
            keys = {("description", pair.description.lower()), ("code", pair.code)}
            if seen.isdisjoint(keys):
                side.append(pair)
            seen |= keys
    if not train or not held_out:
        raise ValueError(
            f"{str(directory)!r} gives {len(train)} training and {len(held_out)} held-out pairs; "
            "both must be positive. Point `data` to a tree with more modules whose functions have "
            "docstrings."
        )
    return Pairs(train=tuple(train), held_out=tuple(held_out))


def is_held_out(module: str) -> bool:
    """Return True if `module` is held out from training, by a hash of its path."""
    return zlib.crc32(module.encode()) % HELD_OUT_SHARE == 0  # unlike `hash`, the same every time


def pairs_in(source: str, module: str) -> Iterator[Pair]:
    """Yield a pair for each function of `source` whose docstring and body are long enough.

    Source that is not valid Python for this interpreter yields nothing: trees of Python files
    contain templates and files for other versions.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for function in sorted(functions, key=lambda node: (node.lineno, node.col_offset)):
        description = " ".join((ast.get_docstring(function) or "").split())
        code = _body_without_docstring(function, lines)
        if len(description.split()) < _MIN_DESCRIPTION_WORDS or len(code) < _MIN_CODE_CHARACTERS:
            continue
        yield Pair(description=description, code=code, module=module, line=function.lineno)


def _body_without_docstring(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> str:
    docstring, *statements = function.body
    if not statements:
        return ""
    first = statements[0]
    # A decorated inner function starts at its first decorator.
    start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    if start <= (docstring.end_lineno or start):  # one line holds both: the text would leak
        return ""
    return textwrap.dedent("\n".join(lines[start - 1 : statements[-1].end_lineno])).strip()


def python_files(directory: Path) -> list[Path]:
    """Return the Python files under `directory`, sorted, without tests and installed packages."""
    paths = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRECTORIES]  # prune
        paths += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("test_")
        ]
    return sorted(paths, key=lambda path: path.relative_to(directory).as_posix())


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # honours the coding line, as Python itself does
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..data import Batches


class PairTokens(NamedTuple):
    """Tokenised pairs: index 0 of dim 1 is the description, index 1 the code.

    Both are padded or cut to one length, so that a step runs the encoder once for both. So each
    weight is gathered once in forward and once in backward, and not twice.
    """

    ids: Int[np.ndarray, "pairs 2 tokens"]
    mask: Bool[np.ndarray, "pairs 2 tokens"]  # False for padding

    def __len__(self) -> int:  # of pairs, not of fields
        return self.ids.shape[0]

    def rows(self, rows: slice) -> PairTokens:
        """Return the pairs at the indices of the slice `rows`."""
        return PairTokens(self.ids[rows], self.mask[rows])


def abstract_tokens(num_pairs: int, num_tokens: int) -> PairTokens:
    """Return the shapes and dtypes of the tokens of one step, as `ShapeDtypeStruct`s."""
    shape = (num_pairs, 2, num_tokens)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
    return PairTokens(ids, mask)  # pyright: ignore[reportArgumentType]


def open_tokenizer(directory: Path) -> Tokenizer:
    """Read the `tokenizer.json` of a folder, and switch off its cutting and padding of texts.

    Raises:
        ValueError: there is no such file.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"There is no `tokenizer.json` in {str(directory)!r}. Save the tokenizer there by "
            "`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
        )
    from tokenizers import Tokenizer  # a report of a step needs shapes alone

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PairTokenizer:
    """A function that tokenises pairs to texts of a fixed length, by a checkpoint's tokenizer."""

    def __init__(self, checkpoint: Path, max_tokens: int):
        """Read `tokenizer.json` of a checkpoint; texts will be cut or padded to `max_tokens`.

        Raises:
            ValueError: `checkpoint` has no `tokenizer.json`, or `max_tokens` leaves no room beside
                the special tokens.
        """
        self._tokenizer = open_tokenizer(checkpoint)
        num_special = self._tokenizer.num_special_tokens_to_add(False)
        if max_tokens <= num_special:
            raise ValueError(
                f"`max_tokens` must be more than the {num_special} special tokens of each text; "
                f"got {max_tokens}."
            )
        # Padding is masked, so its id does not matter.
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.enable_padding(length=max_tokens)

    def __call__(self, pairs: Sequence[Pair]) -> PairTokens:
        """Tokenise pairs; the same text always gives the same row."""
        texts = [text for pair in pairs for text in (pair.description, pair.code)]
        encodings = self._tokenizer.encode_batch(texts)
        shape = (len(pairs), 2, -1)
        ids = np.array([encoding.ids for encoding in encodings], np.int32)
        mask = np.array([encoding.attention_mask for encoding in encodings], bool)
        return PairTokens(ids.reshape(shape), mask.reshape(shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """The tokenised rows of a run: those that are trained on, and those that are held out.

    For an encoder both are `PairTokens`; for a decoder both are int32 arrays `[rows, tokens]`.
    """

    train: Any
    held_out: Any

    @property
    def digest(self) -> str:
        """A hash of all rows; it changes after edits, and with another Python or tokenizer."""
        arrays = (*self.train, *self.held_out)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def load_examples(
    directory: Path | None, checkpoint: Path, num_tokens: int, console: Console
) -> Examples:
    """Collect the pairs of a tree, by default the standard library, and tokenise them.

    Raises:
        ValueError: `directory` is no folder or has too few functions, or the checkpoint has no
            tokenizer.
    """
    directory = standard_library() if directory is None else directory
    tokenize = PairTokenizer(checkpoint, num_tokens)
    pairs = collect_pairs(directory)
    console.print(
        f"{directory}: {len(pairs.train)} training and {len(pairs.held_out)} held-out pairs",
        highlight=False,
        soft_wrap=True,
    )
    return Examples(train=tokenize(pairs.train), held_out=tokenize(pairs.held_out))


def training_batches(rows: Any, zero: Zero, optimization: Optimization) -> Batches:
    """Return an endless iterator over training batches, one for each step.

    Every epoch is a new permutation of all rows. Rows that do not fill a last step are left out: a
    batch that spans two epochs could have a pair twice, which would be its own negative.

    Args:
        rows: `Examples.train`.
        zero: the `Zero` over whose devices a batch is split.
        optimization: the rows of a step, and the seed of their order.

    Raises:
        ValueError: there are fewer rows than a step takes, or they do not divide over the devices.
    """
    import grain  # like `..data`, for training alone: a report does without

    from ..data import Batches

    per_step, num_devices = optimization.batch_size, zero.mesh.size
    if len(rows) < per_step:
        raise ValueError(
            f"`batch_size` asks for {per_step} rows per step, the data has {len(rows)}. Ask for "
            "fewer, or point `data` to a larger tree."
        )
    optimization.check_rows(num_devices)
    order = grain.MapDataset.range(len(rows)).seed(optimization.seed).shuffle()
    epochs = order[: len(rows) - len(rows) % per_step].repeat()
    return Batches(
        epochs.map(lambda i: jax.tree.map(lambda x: x[i], rows)),
        zero,
        batch_size=per_step,
        # The rows are in memory: no thread has to read ahead.
        read_options=grain.ReadOptions(num_threads=0, prefetch_buffer_size=0),
    )
