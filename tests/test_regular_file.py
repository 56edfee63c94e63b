"""Files that others may have replaced are opened if they are regular, and not too large."""

from pathlib import Path

import pytest

from jaxzero._regular_file import IrregularFile, open_regular, read_regular


def test_regular_files_of_bounded_size_are_read(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(IrregularFile, match="file' has 5 bytes, and at most 4 are read"):
        read_regular(path, 4)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
