"""The table of compiled steps over those of the best GSPMD, made of rows."""

from __future__ import annotations

import dataclasses
import types

import jax
import pytest

import jaxzero as jz
from benchmarks.compiled import aot, aot_table
from benchmarks.compiled._message_kernels import message_seconds
from jaxzero._hlo import Rates, parse

SCHEDULE = dataclasses.asdict(jz.CommSchedule())


def row(variant="gspmd-by-hand", option_set="xla", steps=(0.5, 0.8, 2.0), gib=5.0, **changed):
    """`results` of a row; `steps` are seconds at 400, 50 and 12.5 GB/s."""
    links = ("400 GB/s", "50 GB/s", "12.5 GB/s")
    program = {"model": "7b", "form": "plain", "nodes": 2, "local": 8, "batch": 32, "tokens": 2048}
    return {
        **program,
        "variant": variant,
        "option_set": option_set,
        "microbatches": 1,
        "schedule": None if variant.startswith("gspmd") else SCHEDULE,
        "durations": False,
        "temporary_gib": gib,
        "predicted": {
            f"{link} between nodes": {"step_seconds": seconds}
            for link, seconds in zip(links, steps, strict=True)
        },
    } | changed


ROWS = [
    row(),
    row(option_set="early", steps=(0.4, 0.9, 2.5), gib=6.04),
    row("zero3", "jaxzero", (0.6, 0.6, 1.0), 4.0),
]


def test_a_preset_is_compared_with_the_best_set_of_each_link():
    (compared,) = aot_table.comparisons(ROWS)
    sets = {link: best.option_set for link, best in compared.gspmd.items()}
    assert sets == {"400 GB/s": "early", "50 GB/s": "xla", "12.5 GB/s": "xla"}
    ratios = [compared.ratio("zero3", link) for link in sets]
    assert ratios == pytest.approx([1.5, 0.75, 0.5])


def test_the_newest_row_counts_and_other_settings_do_not():
    slower, faster = row(steps=(1.0, 1.0, 3.0)), (0.1, 0.1, 0.1)
    others = [
        row(steps=faster, durations=True),
        row(steps=faster, microbatches=4),
        row("zero3", "jaxzero", faster, schedule=SCHEDULE | {"prefetch": 0}),
        row("gspmd", steps=faster),
        {name: value for name, value in row(steps=faster).items() if name != "option_set"},
        {name: value for name, value in row().items() if name != "predicted"},
    ]
    (compared,) = aot_table.comparisons([*ROWS, *others, slower])
    assert compared.gspmd["12.5 GB/s"].seconds == 2.5
    assert compared.presets["zero3"]["400 GB/s"].seconds == 0.6


def test_programs_without_both_sides_are_left_out_and_others_are_in_order():
    one_node = [{**each, "nodes": 1} for each in ROWS]
    small = [{**each, "model": "1b"} for each in ROWS]
    alone = row(model="moe")
    labels = [x.label for x in aot_table.comparisons([*small, *one_node, alone, *ROWS])]
    tokens = "32 x 2048 tokens"
    assert labels == [
        f"Llama-7B, scanned, 2 x 8, {tokens}",
        f"Llama-7B, scanned, 1 x 8, {tokens}",
        f"Llama-1.1B, scanned, 2 x 8, {tokens}",
    ]


def test_the_table_marks_where_gspmd_is_faster():
    lines = aot_table.table(aot_table.comparisons(ROWS)).splitlines()
    assert lines[0].endswith("| 400 GB/s | 50 GB/s | 12.5 GB/s | temporary memory |")
    assert "| 0.400 s (early) | 0.800 s (xla) | 2.000 s (xla) | 6.0, 5.0, 5.0 GiB |" in lines[2]
    assert "`jz.zero3()` | **1.50** | 0.75 | 0.50 | 4.0 GiB |" in lines[3]


def test_the_plot_has_a_panel_for_each_link():
    pytest.importorskip("matplotlib")
    panels = aot_table.figure(aot_table.comparisons(ROWS)).axes
    drawn = [[line.get_xdata()[0] for line in axes.lines[1:]] for axes in panels]
    assert drawn == [pytest.approx([1.5]), pytest.approx([0.75]), pytest.approx([0.5])]


def test_programs_with_a_current_row_are_left_out(monkeypatch):
    program = {"model": "7b", "variant": "zero3", "schedule": SCHEDULE, "option_set": "jaxzero"}
    rows = [
        {
            "results": program | {"launches": 3},
            "versions": {"jax": jax.__version__},
            "commit": None,
            "uncommitted_changes": False,
        }
    ]
    monkeypatch.setattr(aot, "read_rows", lambda _: rows)
    assert not aot._has_row(program, "aot")  # by which code is not known
    monkeypatch.setattr(aot, "is_current", lambda *_: True)
    assert aot._has_row(program, "aot")
    assert not aot._has_row(program | {"option_set": "xla"}, "aot")
    rows[0]["versions"] = {"jax": "0.1"}
    assert not aot._has_row(program, "aot")


def test_options_that_are_no_set_are_refused():
    with pytest.raises(ValueError, match=r"must be of 'xla', .*; got \['fast'\]"):
        aot.main(options=["xla", "fast"])


LOOP = """HloModule m, is_scheduled=true

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
}

%more (x: f32[8]) -> pred[] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %z = f32[8]{0} while(%x), condition=%more, body=%body
}
"""


def test_a_rival_whose_loops_have_no_trip_count_has_a_row_that_says_so():
    memory = types.SimpleNamespace(
        temp_size_in_bytes=1, argument_size_in_bytes=1, output_size_in_bytes=1
    )
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
    read = aot._figures_if_priced(compiled, LOOP, 8)
    assert "no known trip count" in read["not_priced"] and "predicted" not in read


def test_what_zero3_computes_is_beside_what_one_device_does():
    def computes(variant, seconds, **changed):
        made = row(variant, "jaxzero", **changed)
        for x in made["predicted"].values():
            x |= {"compute_seconds": seconds, "hidden_share": 0.75}
        return made

    ours = computes("zero3", 0.5, message_seconds=0.01)
    alone = computes("one-device", 0.4, schedule=None)
    (line,) = aot_table.compute_table([*ROWS[:2], ours, alone]).splitlines()[2:]
    assert line.endswith("| 0.4000 s | 0.5000 s | 1.250 | 2.0% | 25% | 25% | 25% |")
    assert len(aot_table.compute_table([ours]).splitlines()) == 2  # no row of one device


MESSAGES = """HloModule m, is_scheduled=true

%cast (p: f32[1000]) -> bf16[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %c = bf16[1000]{0} convert(%p), metadata={op_name="jit(f)/jaxzero/gather/w/convert"}
}

%body (x: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %x = (s32[], f32[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %w = f32[1000]{0} get-tuple-element(%x), index=1
  %n = s32[] negate(%i), metadata={op_name="jit(f)/jaxzero/gather/w/negate"}
  %v = f32[1000]{0} negate(%w), metadata={op_name="jit(f)/negate"}
  %m = bf16[1000]{0} fusion(%v), kind=kLoop, calls=%cast
  %u = f32[1000]{0} convert(%m), metadata={op_name="jit(f)/model/convert"}
  ROOT %t = (s32[], f32[1000]{0}) tuple(%n, %u)
}

%more (x: (s32[], f32[1000])) -> pred[] {
  %x = (s32[], f32[1000]{0}) parameter(0)
  ROOT %y = pred[] constant(true)
}

ENTRY %main (x: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %x = (s32[], f32[1000]{0}) parameter(0)
  ROOT %z = (s32[], f32[1000]{0}) while(%x), condition=%more, body=%body, LOOP
}
"""


def test_kernels_of_messages_are_told_by_their_names_in_every_iteration():
    text = MESSAGES.replace("LOOP", 'backend_config={"known_trip_count":{"n":"3"}}')
    seconds = message_seconds(parse(text), Rates(memory=1000.0))
    assert seconds == pytest.approx(3 * (4000 + 2000) / 1000)  # casts; neither counters nor others
