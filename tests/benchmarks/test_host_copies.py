"""Copies from and to host memory in compiled programs, against sums by hand."""

import dataclasses

import numpy as np
import pytest

from benchmarks.compiled._host_copies import (
    host_copies,
    host_to_host,
    share_spanning,
    slice_strides,
)
from benchmarks.compiled.timeline import Timeline, _origin, main
from benchmarks.shared import _rows
from jaxzero._hlo import Rates, timeline

# A row of 4096 bytes crosses the link to the host in 1 ms and is read from the device's memory in
# half of that; a product of two rows takes 3 ms.
RATES = Rates(flops=2048 / 3e-3, memory=8192e3, host=4096e3)
_ROWS = "f32[4,1024]{1,0:S(5)}"  # in host memory
_ROW = "f32[1,1024]{1,0}"
_FETCHED = f"(({_ROWS}, s32[], s32[]), {_ROW}, u32[])"
_STORED = f"(({_ROWS}, {_ROW}, s32[], s32[]), {_ROWS}, u32[])"

_COMPUTATIONS = f"""HloModule step, is_scheduled=true

%row (p: f32[4,1024], i: s32[], j: s32[]) -> f32[1,1024] {{
  %p = {_ROWS} parameter(0)
  %i = s32[] parameter(1)
  %j = s32[] parameter(2)
  %last = s32[] constant(3)
  %turned = s32[] subtract(%last, %i)
  %cut = {_ROW} dynamic-slice(%p, %turned, %j), dynamic_slice_sizes={{1,1024}}, ANNOTATED
  ROOT %same = {_ROW} copy(%cut)
}}

%wrapped (p.1: f32[4,1024], i.1: s32[], j.1: s32[]) -> f32[1,1024] {{
  %p.1 = {_ROWS} parameter(0)
  %i.1 = s32[] parameter(1)
  %j.1 = s32[] parameter(2)
  ROOT %fused = {_ROW} fusion(%p.1, %i.1, %j.1), kind=kLoop, calls=%row
}}

%flat (p.2: f32[4,1024], i.2: s32[]) -> f32[1,1024] {{
  %p.2 = {_ROWS} parameter(0)
  %i.2 = s32[] parameter(1)
  %all = f32[4096]{{0:S(5)}} bitcast(%p.2)
  %few = f32[1024]{{0}} dynamic-slice(%all, %i.2), dynamic_slice_sizes={{1024}}
  ROOT %one = {_ROW} bitcast(%few)
}}

%put (q: f32[4,1024], u: f32[1,1024], k: s32[], l: s32[]) -> f32[4,1024] {{
  %q = {_ROWS} parameter(0)
  %u = {_ROW} parameter(1)
  %k = s32[] parameter(2)
  %l = s32[] parameter(3)
  ROOT %new = {_ROWS} dynamic-update-slice(%q, %u, %k, %l)
}}

%out (d: f32[1,1024]) -> f32[1,1024] {{
  %d = {_ROW} parameter(0)
  ROOT %held = f32[1,1024]{{1,0:S(5)}} copy(%d)
}}

%sum (a.1: f32[1,1024], b.1: f32[1,1024]) -> f32[1,1024] {{
  %a.1 = f32[1,1024]{{1,0:S(5)}} parameter(0)
  %b.1 = {_ROW} parameter(1)
  ROOT %added = {_ROW} add(%a.1, %b.1)
}}
"""
_LOOP = """
%body (carry: (s32[], f32[1,1024], f32[4,1024], f32[1,1024])) -> (s32[], f32[1,1024]) {
  %carry = (s32[], ROW, ROWS, HELD) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %x = ROW get-tuple-element(%carry), index=1
  %w = ROWS get-tuple-element(%carry), index=2
  %h = HELD get-tuple-element(%carry), index=3
  %fetch = FETCHED fusion-start(%w, %n, %n), kind=kLoop, calls=%row
  %product = f32[1,1]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %fetched = ROW fusion-done(%fetch)
  %store = STORED fusion-start(%w, %x, %n, %n), kind=kCustom, calls=%put
  %stored = ROWS fusion-done(%store)
  %read = ROW copy(%h)
  ROOT %out = (s32[], ROW, ROWS, HELD) tuple(%n, %read, %stored, %h)
}

ENTRY %main (a: f32[4,1024], b: f32[1,1024], c: f32[1,1024], m: s32[]) -> f32[4,1024] {
  %a = f32[4,1024]{1,0} parameter(0)
  %b = ROW parameter(1)
  %c = HELD parameter(2)
  %m = s32[] parameter(3)
  %buffer = ROWS custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[], ROW, ROWS, HELD) tuple(%m, %b, %buffer, %c)
  %loop = (s32[], ROW, ROWS, HELD) while(%init), body=%body, {"known_trip_count":{"n":"3"}}
  %send = (ROWS, f32[4,1024]{1,0}, u32[]) copy-start(%a)
  %minus = ROW negate(%b)
  ROOT %sent = ROWS copy-done(%send)
}
"""


def _program(body: str, annotated: str = "dummy=0") -> str:
    """A module of `body` and what it may call."""
    named = {"HELD": "f32[1,1024]{1,0:S(5)}", "FETCHED": _FETCHED, "STORED": _STORED}
    for name, shape in {**named, "ROWS": _ROWS, "ROW": _ROW}.items():
        body = body.replace(name, shape)
    return _COMPUTATIONS.replace("ANNOTATED", annotated) + body


def _entry(*lines: str) -> str:
    """A module that runs `lines` with rows `%x`, `%y` of the device and `%w`, `%h` of the host."""
    given = ("%x = ROW parameter(0)", "%y = ROW parameter(1)", "%w = ROWS parameter(2)")
    more = ("%h = HELD parameter(3)", "%n = s32[] parameter(4)", *lines, "ROOT %r = () tuple()")
    return _program("\nENTRY %main () -> () {\n  " + "\n  ".join((*given, *more)) + "\n}\n")


def test_a_loop_with_copies_both_ways():
    line = timeline(_program(_LOOP), RATES)
    # Each of three turns: 3 ms of product, behind it 1 ms of fetch; then 1 ms of store, which is
    # waited for at once; then a synchronous copy of 1 ms. After the loop four rows leave in 4 ms,
    # behind them the negation of a row, 1 ms.
    np.testing.assert_allclose(line.compute_seconds, 3 * 3e-3 + 1e-3)
    np.testing.assert_allclose(line.host_exposed_seconds, 3 * 2e-3 + 3e-3)
    np.testing.assert_allclose(line.host_seconds, 3 * 3e-3 + 4e-3)
    np.testing.assert_allclose(line.seconds, 19e-3)
    np.testing.assert_allclose(line.host_hidden_share, 1 - 9 / 13)
    assert line.host_bytes_in == 3 * 2 * 4096
    assert line.host_bytes_out == 3 * 4096 + 4 * 4096
    assert line.exposed_seconds == line.communication_seconds == 0


def test_what_each_copy_of_the_loop_is():
    found = {x.name: x for x in host_copies(_program(_LOOP))}
    assert list(found) == ["fetch", "store", "read", "send"]
    sizes = {name: (x.from_host, x.to_host, x.trips) for name, x in found.items()}
    assert sizes == {
        "fetch": (4096, 0, 3),
        "store": (0, 4096, 3),
        "read": (4096, 0, 3),
        "send": (0, 4 * 4096, 1),
    }
    assert {name for name, x in found.items() if x.spans} == {"fetch"}
    assert {name for name, x in found.items() if x.in_loop} == {"fetch", "store", "read"}
    assert share_spanning(_program(_LOOP)) == pytest.approx(3 / 13)
    assert host_to_host(_program(_LOOP)) == []


_FETCH = "%{0} = FETCHED {1}-start(%w, %n, %n), calls=%{2}"
_STORE = "%{0} = STORED fusion-start(%w, %x, %n, %n), kind=kCustom, calls=%put"
_MINUS = "%minus = ROW negate(%x)"


@pytest.mark.parametrize(
    ("lines", "seconds", "waiting", "sizes"),
    [
        # Nothing between start and end, however it is started.
        ((_FETCH.format("s", "fusion", "row"), "%d = ROW fusion-done(%s)"), 1, 1, (1, 0)),
        ((_FETCH.format("s", "async", "wrapped"), "%d = ROW async-done(%s)"), 1, 1, (1, 0)),
        (("%s = (ROW, HELD, u32[]) copy-start(%h)", "%d = ROW copy-done(%s)"), 1, 1, (1, 0)),
        (("%s = (HELD, ROW, u32[]) copy-start(%x)", "%d = HELD copy-done(%s)"), 1, 1, (0, 1)),
        # Not asynchronous.
        (("%d = ROW fusion(%w, %n, %n), kind=kLoop, calls=%row",), 1, 1, (1, 0)),
        (("%d = ROW fusion(%w, %n), kind=kLoop, calls=%flat",), 1, 1, (1, 0)),
        (("%d = ROW dynamic-slice(%w, %n, %n), dynamic_slice_sizes={1,1024}",), 1, 1, (1, 0)),
        (("%d = ROW slice(%w), slice={[0:1], [0:1024]}",), 1, 1, (1, 0)),
        (("%d = ROWS dynamic-update-slice(%w, %x, %n, %n)",), 1, 1, (0, 1)),
        (("%d = ROW copy(%h)",), 1, 1, (1, 0)),
        (("%d = HELD fusion(%x), kind=kLoop, calls=%out",), 1, 1, (0, 1)),
        # One after the other in each direction, side by side in both; a negation beside them.
        (
            (_FETCH.format("s", "fusion", "row"), _FETCH.format("t", "fusion", "row"))
            + (_STORE.format("u"), _MINUS, "%a = ROWS fusion-done(%u)")
            + ("%b = ROW fusion-done(%s)", "%c = ROW fusion-done(%t)"),
            2,
            1,
            (2, 1),
        ),
        # A sum that reads one operand from the host, 1 ms, and moves 8192 bytes of its own, 1 ms.
        (("%d = ROW fusion(%h, %x), kind=kLoop, calls=%sum",), 1, 0, (1, 0)),
        # From host memory to host memory: through the device, so it keeps both directions.
        (("%d = HELD copy(%h)",), 1, 1, (1, 1)),
        # Placements, and names of parts, are no copies.
        (('%d = ROWS custom-call(), custom_call_target="AllocateBuffer"',), 0, 0, (0, 0)),
        (("%t = (ROWS, HELD) tuple(%w, %h)", "%d = ROWS get-tuple-element(%t), index=0"), 0, 0)
        + ((0, 0),),
    ],
)
def test_each_form_of_a_copy(lines, seconds, waiting, sizes):
    text = _entry(*lines)
    line = timeline(text, RATES)
    np.testing.assert_allclose(line.seconds, seconds * 1e-3)
    np.testing.assert_allclose(line.host_exposed_seconds, waiting * 1e-3)
    np.testing.assert_allclose(line.compute_seconds, (seconds - waiting) * 1e-3)
    num_copies = sum(sizes) if sizes != (1, 1) else 1  # that one goes both ways at once
    np.testing.assert_allclose(line.host_seconds, num_copies * 1e-3)
    assert (line.host_bytes_in, line.host_bytes_out) == (sizes[0] * 4096, sizes[1] * 4096)
    copies = host_copies(text)
    assert sum(x.from_host for x in copies) == sizes[0] * 4096
    assert sum(x.to_host for x in copies) == sizes[1] * 4096
    assert not any(x.spans or x.in_loop for x in copies)


def test_a_copy_spans_the_products_of_a_loop_or_a_fusion_meanwhile():
    started, done = _FETCH.format("s", "fusion", "row"), "%d = ROW fusion-done(%s)"
    loop = '%loop = (s32[]) while(%n), body=%turn, known_trip_count":{"n":"2"}'
    fusion = "%f = f32[1,1]{1,0} fusion(%x, %y), kind=kCustom, calls=%multiply"
    inside = """
%multiply (f: f32[1,1024], g: f32[1,1024]) -> f32[1,1] {
  %f = ROW parameter(0)
  %g = ROW parameter(1)
  ROOT %fg = f32[1,1]{1,0} dot(%f, %g), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%turn (v: f32[1,1024]) -> f32[1,1] {
  %v = ROW parameter(0)
  ROOT %vv = f32[1,1]{1,0} fusion(%v, %v), kind=kCustom, calls=%multiply
}
""".replace("ROW", _ROW)
    for between, share in ((loop, 1), (fusion, 1), (_MINUS, 0)):
        text = _entry(started, between, done).replace("\nENTRY", inside + "\nENTRY")
        assert share_spanning(text) == share, between


def test_copies_from_host_memory_to_host_memory_are_found():
    (found,) = host_to_host(_entry("%d = HELD copy(%h)", "%e = ROW copy(%h)"))
    assert (found.name, found.from_host, found.to_host) == ("d", 4096, 4096)


# As the XLA of JAX 0.10.2 and of 0.12.0.1 annotate the slice of a scan in reverse, each with other
# parts of the backend's config around it. The older one's is wrong: it reads forward.
_OLD = '"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"4096"}'
_NEW = (
    '"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"0",'
    '"linear":{"byte_offset":"12288","byte_stride":"-4096"}}'
)


@pytest.mark.parametrize(("annotated", "stride"), [(_OLD, 4096), (_NEW, -4096), ("", None)])
def test_strides_of_slices_in_loops(annotated, stride):
    config = f'backend_config={{"operation_queue_id":"0",{annotated}}}'
    strides = slice_strides(_program(_LOOP, config))
    assert strides == {"fetch": stride, "store": None, "read": None}


def test_a_stride_that_cannot_be_read_is_refused():
    other = 'backend_config={"dynamic_slice_config":{"loop_index":"0","table":{"offsets":["0"]}}}'
    with pytest.raises(ValueError, match="cannot read the stride of a slice: .*table"):
        slice_strides(_program(_LOOP, other))


def test_programs_that_say_too_little_are_refused():
    with pytest.raises(ValueError, match="no share of them"):
        share_spanning(_entry(_MINUS))
    unknown = _program(_LOOP.replace("known_trip_count", "other"))
    for read in (host_copies, lambda text: timeline(text, RATES)):
        with pytest.raises(ValueError, match="no known trip count"):
            read(unknown)
        with pytest.raises(ValueError, match=r"\['s'\] in `main` are started and never awaited"):
            read(_entry(_FETCH.format("s", "fusion", "row")))


def test_the_command_prints_lines_of_the_host(tmp_path, capsys):
    printed = []
    for text in (_program(_LOOP), _entry(_MINUS)):
        (tmp_path / "step.hlo").write_text(text)
        main(Timeline(tmp_path / "step.hlo", RATES))
        printed.append(capsys.readouterr().out)
    assert "  waiting for host  0.0090 s\n" in printed[0]
    assert "host copies take    0.0130 s, 30.8% hidden\n" in printed[0]
    assert "from the host       0.000 GiB\n" in printed[0]
    assert "to the host         0.000 GiB\n" in printed[0]
    origin, _, rest = printed[1].partition("\n")
    assert "host" not in rest
    assert origin.startswith("rates ") and origin.endswith("; given: flops, memory, host")


def test_the_timeline_says_which_rates_it_used(monkeypatch, tmp_path):
    stated = Rates(num_local=4)
    assert _rows.measured_rates(stated, directory=tmp_path) == (stated, None)
    assert _origin(stated, stated, None) == "stated"

    monkeypatch.setattr(_rows, "_hardware", lambda: {"accelerator": "NVIDIA H200"})
    results = {"devices": 1, "flops": 6e14, "memory": 4e12}
    written = _rows.append_row("measured_rates", results, directory=tmp_path)
    measured, row = _rows.measured_rates(stated, directory=tmp_path)
    assert measured == dataclasses.replace(stated, flops=6e14, memory=4e12) and row == written
    where = f"measured on NVIDIA H200, {row['date'][:10]}"
    assert _origin(measured, measured, row) == f"{where}: flops, memory; the others stated"
    given = dataclasses.replace(measured, memory=1e12)
    assert _origin(given, measured, row) == f"{where}: flops; the others stated; given: memory"
