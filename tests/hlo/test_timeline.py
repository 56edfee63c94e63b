"""The timeline of a compiled program, and durations of its operations, against sums by hand."""

import re

import numpy as np
import pytest

from jaxzero._hlo import Rates, Timeline, durations, timeline

_HLO = """HloModule step, is_scheduled=true

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %s = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}
  %y = f32[1024]{0} negate(%x)
  %done = f32[2048]{0} all-gather-done(%s)
  %z = f32[1024]{0} all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %out = (s32[], f32[1024]{0}) tuple(%i, %z)
}

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[1024]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[1024]{0}) while(%init), body=%body, {"known_trip_count":{"n":"5"}}
  ROOT %r = f32[1024]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_program_is_walked_with_stated_rates():
    rates = Rates(flops=1e12, memory=8192e3, local=4096e3, node=8192e3, num_local=2, launch=1e-3)
    line = timeline(_HLO, rates)
    # Each of five turns: negate 8192 bytes in 1 ms; beside it an all-gather of 4096 bytes from
    # the node's other device, 1 + 1 ms; then an all-reduce between two nodes, of which two run
    # side by side and bring 4096 bytes each into the node, 1 + 1 ms.
    np.testing.assert_allclose(line.compute_seconds, 5 * 1e-3)
    np.testing.assert_allclose(line.communication_seconds, 5 * (2e-3 + 2e-3), rtol=1e-6)
    np.testing.assert_allclose(line.exposed_seconds, 5 * (1e-3 + 2e-3), rtol=1e-6)
    np.testing.assert_allclose(line.seconds, line.compute_seconds + line.exposed_seconds)
    assert dict(line.launches) == {"all-gather": 5, "all-reduce": 5}
    assert line.asynchronous_share == pytest.approx(1 / 2)


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="no known trip count"):
        timeline(_HLO.replace("known_trip_count", "other"), Rates(num_local=2))


def test_durations_are_those_of_the_timeline():
    """In microseconds: 1 ms for 4096 bytes inside a node or 8192 into it, and 1 ms to start."""
    rates = Rates(flops=1e12, memory=8192e3, local=4096e3, node=8192e3, num_local=2, launch=1e-3)
    profile = durations(_HLO, rates)
    found = dict(re.findall(r'costs { name: "(\S+)" cost_us: (\S+) }\n', profile))
    assert set(found) == {"s", "y", "done", "z", "loop"}
    assert {name: float(x) for name, x in found.items()} == pytest.approx(
        {"s": 2000, "y": 1000, "done": 0, "z": 2000, "loop": 5 * 4000}
    )


def test_a_loop_of_unknown_length_has_no_duration():
    with pytest.raises(ValueError, match="no known trip count"):
        durations(_HLO.replace("known_trip_count", "other"), Rates(num_local=2))


_STREAMS = """HloModule step, is_scheduled=true

%add (m: f32[], n: f32[]) -> f32[] {
  %m = f32[] parameter(0)
  %n = f32[] parameter(1)
  ROOT %sum = f32[] add(%m, %n)
}

%short (s: f32[1024]) -> f32[1024] {
  %s = f32[1024]{0} parameter(0)
  ROOT %s1 = f32[1024]{0} negate(%s)
}

%long (l: f32[1024]) -> f32[1024] {
  %l = f32[1024]{0} parameter(0)
  %l1 = f32[1024]{0} negate(%l)
  ROOT %l2 = f32[1024]{0} negate(%l1)
}

ENTRY %main (a: f32[1024], h: f32[1024], c: s32[]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %h = f32[1024]{0:S(5)} parameter(1)
  %c = s32[] parameter(2)
  STEPS
}
"""
_RATES = Rates(flops=1e12, memory=8192e3, local=4096e3, host=4096e3, num_local=2, launch=1e-3)


def _walked(*steps: str) -> Timeline:
    return timeline(_STREAMS.replace("STEPS", "\n  ".join(steps)), _RATES)


def test_collectives_take_turns_on_one_stream():
    line = _walked(
        "%s = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%a), replica_groups={{0,1},{2,3}}",
        "%t = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%a), replica_groups={{0,1},{2,3}}",
        "%y = f32[1024]{0} negate(%a)",
        "%u = f32[2048]{0} all-gather-done(%s)",
        "ROOT %v = f32[2048]{0} all-gather-done(%t)",
    )
    # Each takes 2 ms, the second from when the first is done; 1 ms of them is hidden by the negate.
    assert line.seconds == pytest.approx(4e-3)
    assert line.exposed_seconds == pytest.approx(3e-3)
    assert line.hidden_share == pytest.approx(1 / 4)
    assert line.received_bytes == line.asynchronous_bytes == line.local_bytes == 2 * 4096
    assert line.node_bytes == 0 and line.asynchronous_share == 1


def test_a_collective_that_nothing_is_computed_beside_is_waited_for():
    line = _walked(
        "%y = f32[1024]{0} negate(%a)",
        "%s = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%y), replica_groups={{0,1},{2,3}}",
        "ROOT %u = f32[2048]{0} all-gather-done(%s)",
    )
    assert line.seconds == pytest.approx(3e-3) and line.hidden_share == pytest.approx(0)
    assert line.asynchronous_bytes == line.asynchronous_share == 0


def test_copies_from_and_to_the_host_have_a_stream_each():
    started = "(f32[1024]{0}, f32[1024]{0:S(5)}, u32[])"
    line = _walked(
        f"%s = {started} copy-start(%h)",
        f"%x = {started} copy-start(%h)",
        "%t = (f32[1024]{0:S(5)}, f32[1024]{0}, u32[]) copy-start(%a)",
        "%n = f32[1024]{0} negate(%a)",
        "%u = f32[1024]{0} copy-done(%s)",
        "%v = f32[1024]{0:S(5)} copy-done(%t)",
        "%y = f32[1024]{0} copy-done(%x)",
        "%z = f32[1024]{0} negate(%y)",
        "ROOT %w = f32[1024]{0} copy(%h)",
    )
    # Copies of 1 ms each. One to the host and one from it run beside the first negate. The second
    # from the host begins after them, and is waited for, as is the last, after the second negate.
    assert (line.host_bytes_in, line.host_bytes_out) == (3 * 4096, 4096)
    assert line.host_seconds == pytest.approx(4e-3)
    assert line.host_exposed_seconds == pytest.approx(2e-3)
    assert line.host_hidden_share == pytest.approx(1 / 2)
    assert line.seconds == pytest.approx(4e-3) and line.exposed_seconds == 0
    assert line.hidden_share == 1  # there is nothing to hide


def test_of_branches_the_longest_counts_and_a_call_counts_once():
    line = _walked(
        "%b = f32[1024]{0} conditional(%c, %a, %a), branch_computations={%short, %long}",
        "ROOT %d = f32[1024]{0} call(%b), to_apply=%short",
    )
    assert line.seconds == line.compute_seconds == pytest.approx(3e-3)


_EXCHANGE = """HloModule step, is_scheduled=true

%exchange (x: f32[1,1,2,1024]) -> f32[1,8,2,1024] {
  %x = f32[1,1,2,1024]{3,2,1,0} parameter(0)
  %k = (f32[1,8,2,1024]{3,2,1,0}, u8[8,2,1,1024], bf16[8,2,1,4]) custom-call(%x), KERNEL
  ROOT %y = f32[1,8,2,1024]{3,2,1,0} get-tuple-element(%k), index=0
}

ENTRY %main (a: f32[1,1,2,1024], b: f32[1024]) -> f32[1,8,2,1024] {
  %a = f32[1,1,2,1024]{3,2,1,0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  %s = ((f32[1,1,2,1024]{3,2,1,0}), f32[1,8,2,1024]{3,2,1,0}) call-start(%a), to_apply=%exchange
  %n = f32[1024]{0} negate(%b)
  ROOT %d = f32[1,8,2,1024]{3,2,1,0} call-done(%s)
}
"""


def test_a_kernel_that_is_an_exchange_is_hidden_by_what_is_beside_it():
    """7 peers send 2 tiles of 1024 codes and 4 scales each; a launch takes 1 ms, a negate 2 ms."""
    received = 7 * 2 * (1024 + 4 * 2)
    rates = Rates(memory=4096e3, local=received * 1e3 / 40, launch=1e-3)
    kernel = 'custom_call_target="mosaic_gpu_v2", metadata={op_name="f/quantized_all_gather/k"}'
    line = timeline(_EXCHANGE.replace("KERNEL", kernel), rates)
    assert line.received_bytes == line.local_bytes == line.asynchronous_bytes == received
    assert line.communication_seconds == pytest.approx(41e-3)  # 22 ms of its own memory traffic
    assert line.compute_seconds == pytest.approx(2e-3)
    assert line.seconds == pytest.approx(41e-3)
    assert line.exposed_seconds == pytest.approx(39e-3)
    assert line.launches == {"exchange": 1}


def test_a_call_on_another_stream_that_is_no_exchange_is_compute():
    line = timeline(_EXCHANGE.replace("KERNEL", 'custom_call_target="other"'), Rates(memory=4096e3))
    assert not line.launches and line.received_bytes == line.communication_seconds == 0
    assert line.seconds == line.compute_seconds == pytest.approx(24e-3, rel=0.01)  # 22 and 2 ms


_FUSIONS = """HloModule step, is_scheduled=true

%row (p: f32[64,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[64,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row.1 = f32[1,1024]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,1024}
}

%wrapped (q: f32[64,1024], j: s32[]) -> f32[1,1024] {
  %q = f32[64,1024]{1,0} parameter(0)
  %j = s32[] parameter(1)
  ROOT %slice = f32[1,1024]{1,0} fusion(%q, %j), kind=kLoop, calls=%row
}

ENTRY %main (a: f32[64,1024], b: s32[]) -> f32[1,1024] {
  %a = f32[64,1024]{1,0} parameter(0)
  %b = s32[] parameter(1)
  FORM
  ROOT %r = f32[1,1024]{1,0} DONE
}
"""
_STARTED = "((f32[64,1024]{1,0}, s32[]), f32[1,1024]{1,0}, u32[])"


@pytest.mark.parametrize("slices", ["dynamic-slice", "dynamic-update-slice"])
def test_a_fusion_takes_its_part_of_a_stack_in_another_shape(slices):
    """Residuals of scanned layers are read and written so: a bitcast of the stack comes first."""
    stack = "f32[64,1024]{1,0}"
    row = "%n = f32[1,1,1024]{2,1,0} bitcast(%n.1)"
    inner = "%row.1 = f32[1,1,1024]{2,1,0} dynamic-slice(%w, %i, %i, %i)"
    result = "f32[1,1,1024]{2,1,0}"
    if slices == "dynamic-update-slice":
        inner = "%row.1 = f32[64,1,1024]{2,1,0} dynamic-update-slice(%w, %n, %i, %i, %i)"
        result = "f32[64,1,1024]{2,1,0}"
    text = f"""HloModule step, is_scheduled=true

%row (p: f32[64,1024], i: s32[], n.1: f32[1,1024]) -> {result} {{
  %p = {stack} parameter(0)
  %i = s32[] parameter(1)
  %n.1 = f32[1,1024]{{1,0}} parameter(2)
  {row}
  %w = f32[64,1,1024]{{2,1,0}} bitcast(%p)
  ROOT {inner}
}}

ENTRY %main (a: f32[64,1024], b: s32[], c: f32[1,1024]) -> {result} {{
  %a = {stack} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[1,1024]{{1,0}} parameter(2)
  ROOT %r = {result} fusion(%a, %b, %c), kind=kLoop, calls=%row
}}
"""
    line = timeline(text, Rates(memory=1.0))
    # A row is read (of the stack, or of what is new) and one is written, beside the index.
    reads = 2 * 4096 if slices == "dynamic-slice" else 4096
    assert line.compute_seconds == reads + 4096 + 4


@pytest.mark.parametrize(
    ("form", "done"),
    [
        ("", "fusion(%a, %b), kind=kLoop, calls=%row"),
        (f"%s = {_STARTED} fusion-start(%a, %b), calls=%row", "fusion-done(%s)"),
        (f"%s = {_STARTED} async-start(%a, %b), calls=%wrapped", "async-done(%s)"),
    ],
)
def test_a_fusion_costs_the_same_however_it_is_started(form, done):
    line = timeline(_FUSIONS.replace("FORM", form).replace("DONE", done), Rates(memory=8196.0))
    assert (
        line.seconds == line.compute_seconds == 1
    )  # one row read and one written, and where it is


_KERNEL, _IMAGES, _MADE = "bf16[640,3,3,320]", "bf16[16,32,32,320]", "bf16[16,32,32,640]"


@pytest.mark.parametrize(
    ("called", "result", "operands"),
    [
        ("$convForward", _MADE, (_IMAGES, _KERNEL)),
        ("$convBiasActivationForward", _MADE, (_IMAGES, _KERNEL)),
        ("$convBackwardInput", _IMAGES, (_MADE, _KERNEL)),
        ("$convBackwardFilter", _KERNEL, (_IMAGES, _MADE)),
    ],
)
def test_a_convolution_and_its_derivatives_cost_as_much(called, result, operands):
    """Two for each element of the output, each channel of the input and each of 3 x 3 places."""
    first, second = operands
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (a: {first}, b: {second}) -> ({result}, u8[0]) {{
  %a = {first}{{3,2,1,0}} parameter(0)
  %b = {second}{{3,2,1,0}} parameter(1)
  ROOT %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn{called}"
}}
"""  # noqa: E501
    line = timeline(text, Rates(flops=1.0, memory=1e30))
    assert line.compute_seconds == 2 * (16 * 32 * 32 * 640) * 320 * 9


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [
        ("NO_MASK", 0, 8 * 8),
        ("CAUSAL", 0, sum(range(1, 9))),
        ("CAUSAL", 3, 1 + 2 + 6 * 3),
    ],
)
@pytest.mark.parametrize(("backward", "products"), [("", 2), ("Backward", 5)])
def test_fused_attention_costs_what_it_does_not_leave_out(mask, window, pairs, backward, products):
    """2 rows and 4 heads of size 16, for 2 key-value heads."""
    query, key = "bf16[2,8,4,16]", "bf16[2,8,2,16]"
    config = f'"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": ["2", "4", "8", "8"]}}, "mask_type": "{mask}", "sliding_window_length": {window}'  # noqa: E501
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (a: {query}, b: {key}, c: {key}) -> ({query}, u8[0]) {{
  %a = {query}{{3,2,1,0}} parameter(0)
  %b = {key}{{3,2,1,0}} parameter(1)
  %c = {key}{{3,2,1,0}} parameter(2)
  ROOT %d = ({query}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b, %c), custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config={{"cudnn_fmha_backend_config": {{{config}}}}}
}}
"""  # noqa: E501
    line = timeline(text, Rates(flops=1.0, memory=1e30))
    assert line.compute_seconds == 2 * 2 * 4 * pairs * 16 * products
