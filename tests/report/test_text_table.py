"""Tables of plain text: rows of equal layers are one row, names stay whole, lines fit."""

from jaxzero._report.text_table import TextTable, merge_layers, ranges, summarized, wrapped


def test_equal_layers_share_a_row():
    rows = [
        (("layers.0.up", "layers.0.down"), ("1 B",)),
        (("layers.1.up", "layers.1.down"), ("1 B",)),
        (("layers.2.up", "layers.2.down"), ("2 B",)),
        (("layers.3.up", "layers.3.down"), ("1 B",)),
        (("head",), ("1 B",)),
    ]
    found = [(row.names, row.members) for row in merge_layers(rows)]
    assert found == [
        (("layers[0..1,3].up", "layers[0..1,3].down"), (0, 1, 3)),
        (("layers.2.up", "layers.2.down"), (2,)),
        (("head",), (4,)),
    ]


def test_experts_of_layers_share_a_row():
    names = [f"layers.{i}.experts.{j}.up" for i in range(3) for j in range(4)]
    (row,) = merge_layers([((name,), ()) for name in names])
    assert row.names == ("layers[0..2].experts[0..3].up",)
    assert row.members == tuple(range(12))


def test_names_of_a_bucket_in_few_words():
    assert summarized(["a.b"]) == "a.b"
    assert summarized(["a.0.x", "a.0.y", "a.0.x"]) == "a.0 (2 leaves)"
    assert summarized(["a.x", "b.x", "c"]) == "a.x and 2 more"
    assert ranges([4, 0, 1, 2]) == "0..2,4"


def test_text_is_wrapped_and_not_cut():
    assert wrapped("a.b.c d", 4) == ["a.b.", "c d"]
    assert "".join(wrapped("x" * 30, 7)) == "x" * 30
    table = TextTable(headings=("name", "value"), rows=[("n" * 50, "v " * 40)])
    lines = table.lines(40)
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("n" * 10) == 5 and "".join(lines).count("v") == 41
