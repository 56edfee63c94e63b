"""Shapes and collectives that are read from the text of a program."""

import pytest

from jaxzero._hlo.collectives import collectives, shapes


@pytest.mark.parametrize(
    "started",
    [
        "(f32[1024]{0}, bf16[512]{0}) all-reduce-start(%a, %b)",  # JAX 0.10
        "((f32[1024]{0}, bf16[512]{0}), (f32[1024]{0}, bf16[512]{0})) all-reduce-start(%a, %b)",
    ],
)
def test_an_all_reduce_of_several_arrays_counts_all(started: str):
    (sent,) = collectives(f"%x = {started}, replica_groups={{{{0,1}}}}, to_apply=%add")
    assert sent.entering_bytes == 4 * 1024 + 2 * 512


@pytest.mark.parametrize("contexts", ["", ", u32[], u32[]", ", u32[]{:S(2)}, u32[]{:S(2)}"])
def test_contexts_of_a_permute_are_not_sent(contexts: str):
    started = f"(f32[8]{{0}}, f32[8]{{0}}{contexts}) collective-permute-start(%a)"
    (sent,) = collectives(f"%x = {started}, source_target_pairs={{{{0,1}},{{1,0}}}}")
    assert sent.entering_bytes == 4 * 8


def test_numbers_of_4_bits_share_a_byte_if_the_layout_says_so():
    text = "(s4[3,5]{1,0:E(4)}, s4[3,5]{1,0}, f4e2m1fn[16]{0:E(4)}, f8e5m2[16]{0}, c64[2]{0})"
    assert [x.num_bytes for x in shapes(text)] == [8, 15, 8, 16, 16]
