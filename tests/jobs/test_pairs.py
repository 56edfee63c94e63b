"""Pairs from Python source: what is one, what is not, and where it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxzero.jobs._data import collect_pairs, is_held_out, pairs_in, standard_library

HELD_OUT = ["module_1.py", "module_10.py"]
LONG = "value = first + second * third - fourth"  # a body long enough to count


def only(source: str):
    (pair,) = pairs_in(source, "m.py")
    return pair


def test_a_pair_is_docstring_and_body_without_name_and_signature():
    pair = only(f'''
class Thing:
    @property
    async def name(self, argument=1):
        """Say   what it
        is called."""
        # why
        {LONG}
        if value:
            return value
''')
    assert pair.description == "Say what it is called."
    assert pair.code == f"{LONG}\nif value:\n    return value"
    assert (pair.module, pair.line) == ("m.py", 4)


def test_functions_inside_functions_come_in_order_of_lines():
    source = '''
def outer():
    """Make the inner one."""
    @decorated
    def inner():
        """Compute the inner value."""
        return first + second * third - fourth - fifth
    return inner
'''
    outer, inner = pairs_in(source, "m.py")
    assert outer.code.startswith("@decorated\ndef inner():")
    assert inner.description == "Compute the inner value."


@pytest.mark.parametrize(
    "source",
    [
        f"def f():\n    {LONG}\n    return value",  # no docstring
        f'def f():\n    "Too short."\n    {LONG}',
        'def f():\n    "Nothing is done here at all."',
        'def f():\n    "The body is trivial here."\n    return 1',
        f'def f(): "The docstring shares the line."; {LONG}',
        f'class C:\n    "A class with a docstring."\n    {LONG}',
        "def f(:",  # not Python
        "\0",
    ],
)
def test_what_is_no_pair(source: str):
    assert not list(pairs_in(source, "m.py"))


def test_split_is_by_module_and_stable(tmp_path: Path):
    # Fixed by the hash: were it to change, old runs could no longer be compared with new ones.
    names = [f"module_{index}.py" for index in range(20)]
    assert [name for name in names if is_held_out(name)] == HELD_OUT
    _write_tree(tmp_path, names)
    pairs = collect_pairs(tmp_path)
    assert [pair.module for pair in pairs.held_out] == HELD_OUT
    assert len(pairs.train) == len(names) - len(HELD_OUT)
    assert collect_pairs(tmp_path) == pairs


def test_tests_and_installed_packages_are_left_out(tmp_path: Path):
    names = [f"module_{index}.py" for index in range(20)]
    _write_tree(tmp_path, names)
    expected = collect_pairs(tmp_path)
    ignored = ["test/a.py", "x/tests/a.py", "site-packages/a.py", "__pycache__/a.py", "test_a.py"]
    _write_tree(tmp_path, ignored)
    (tmp_path / "latin.py").write_bytes(b'def f():\n    "caf\xe9 au lait s\'il vous plait"\n')
    assert collect_pairs(tmp_path) == expected


def test_repeated_texts_are_kept_once(tmp_path: Path):
    names = [f"module_{index}.py" for index in range(20)]
    _write_tree(tmp_path, names)
    expected = collect_pairs(tmp_path)
    (tmp_path / "zz.py").write_text((tmp_path / names[0]).read_text())
    assert collect_pairs(tmp_path) == expected


@pytest.mark.ci
def test_standard_library_has_thousands():
    pairs = collect_pairs(standard_library())
    assert len(pairs.train) > 3000
    assert len(pairs.held_out) > 400
    assert not {pair.module for pair in pairs.train} & {pair.module for pair in pairs.held_out}


def test_trees_without_pairs_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"0 training and 0 held-out pairs.*Point `data`"):
        collect_pairs(tmp_path)
    with pytest.raises(ValueError, match=r"`data` must be a directory.*Leave it out"):
        collect_pairs(tmp_path / "missing")


def _write_tree(directory: Path, names: list[str]) -> None:
    for index, name in enumerate(names):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'def f():\n    """Do the thing of {name} now."""\n    {LONG} + {index}\n')
