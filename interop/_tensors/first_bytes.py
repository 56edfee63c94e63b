"""Recognize files that are no checkpoints by their first bytes, and say what to do with them."""

from collections.abc import Iterable
from pathlib import Path

from jaxzero._regular_file import open_regular, regular_size

_AGAIN = "Copy or download it again."
_ARRAYS = "pass the arrays by name: `interop.load_into(tree, {name: array, ...})`"
_PACKED = "Unpack it, and give the file or directory inside."
_TF = (
    "the weights of a Keras or TensorFlow model (HDF5)",
    f"Give the safetensors of the model, or read it with `h5py` and {_ARRAYS}.",
)
# The first bytes, what the file is, and the next step; the first row that fits is used.
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"GGUF",
        "a GGUF file of llama.cpp",
        "Give the safetensors that it was made of; or let transformers convert it: "
        "`AutoModelForCausalLM.from_pretrained(directory, gguf_file=name).save_pretrained(new)`.",
    ),
    (
        b"version https://git-lfs",
        "a pointer of git-lfs, not the file that it stands for",
        "Fetch the file: `git lfs pull` in the clone, or `hf download`.",
    ),
    (b"\x89HDF\r\n\x1a\n", *_TF),
    (b"\x93NUMPY", "an array of numpy (.npy)", f"Read it with `np.load` and {_ARRAYS}."),
    (b"\x1f\x8b", "compressed by gzip", _PACKED),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _PACKED),
    (b"BZh", "compressed by bzip2", _PACKED),
    (b"\xfd7zXZ\x00", "compressed by xz", _PACKED),
    (b"7z\xbc\xaf\x27\x1c", "an archive of 7-Zip", _PACKED),
)
_PICKLE = (
    "a bare pickle, which `torch.save` does not write",
    "Loading a pickle can run any code. If you trust its author, load it with the program that "
    f"wrote it, convert what it holds to numpy arrays, and {_ARRAYS}.",
)
_MSGPACK = (
    "a msgpack of Flax",
    f"Read it with `flax.serialization.msgpack_restore(path.read_bytes())`, and {_ARRAYS}.",
)
_ONNX = (
    "a model of ONNX",
    "Give the checkpoint that it was exported from; or read `onnx.load(path).graph.initializer` "
    f"with `onnx.numpy_helper.to_array` and {_ARRAYS}.",
)
_HTML = (
    "a page of HTML, such as a server sends for an error or a login",
    "Download the file itself: on the Hugging Face hub by `hf download`, or by the link with "
    "`/resolve/` and not `/blob/`.",
)
_JSON = ("text in JSON", "Give the file of weights beside it, or their directory.")
_TAR = ("an archive of tar", _PACKED)
_ZEROS = ("nothing but zeros where it begins, as a download that was cut off leaves", _AGAIN)
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # of PyTorch before 1.6
_LONGEST = 512  # bytes that are looked at; tar has its name from byte 257 on


def kind_of_file(file: Path, start: int = 0) -> str | None:
    """Return the kind of a file and what to do with it, or None if its first bytes are unknown.

    The text completes a sentence that begins with the file's name: `is a GGUF file of llama.cpp.
    Give ...`.

    Args:
        file: a regular file.
        start: byte offset at which to look for the first bytes.
    """
    with open_regular(file) as opened:
        opened.seek(start)
        head = opened.read(_LONGEST)
    if not head:
        return f"is empty. {_AGAIN}" if regular_size(file) == 0 else None
    kind = next(((what, step) for begin, what, step in _KINDS if head.startswith(begin)), None)
    kind = kind or _kind_of(head)
    if kind is None:
        return None
    verb = "is" if kind is not _ZEROS else "holds"
    return f"{verb} {kind[0]}. {kind[1]}"


def _kind_of(head: bytes) -> tuple[str, str] | None:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return _HTML
    if text.startswith((b"{", b'["')):
        return _JSON
    if head[257:262] == b"ustar":
        return _TAR
    is_pickle = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5  # the protocol
    if is_pickle and not head.startswith(_OLD_TORCH):
        return _PICKLE
    if _begins_msgpack(head):
        return _MSGPACK
    # ONNX: fields of a protobuf, the version and then the producer, the graph or the operators.
    if len(head) > 2 and head[0] == 8 and 0 < head[1] < 32 and head[2] in (0x12, 0x3A, 0x42):
        return _ONNX
    return _ZEROS if not any(head) and len(head) > 8 else None


def _begins_msgpack(head: bytes) -> bool:
    """Return whether bytes begin a msgpack map whose first key is text of at most 255 bytes."""
    # The types fixmap (not empty), map 16 and map 32; below, fixstr and str 8.
    skipped = 1 if 0x81 <= head[0] <= 0x8F else {0xDE: 3, 0xDF: 5}.get(head[0], 0)
    key = head[skipped : skipped + 1]
    return bool(skipped and key) and (0xA1 <= key[0] <= 0xBF or key[0] == 0xD9)


def kind_of_archive(names: Iterable[str]) -> str | None:
    """Return the kind of a zip archive, given the names in it, and what to do with it.

    The text is like that of `kind_of_file`; None if the kind is unknown.
    """
    names = list(names)
    if names and all(name.endswith(".npy") for name in names):
        return f"is an archive of numpy (.npz). Read it with `np.load` and {_ARRAYS}."
    if "model.weights.h5" in names:
        return f"is a model of Keras. {_PACKED}"
    return None
