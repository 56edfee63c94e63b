"""Predict the time of an instruction of a compiled program by a cost model, not by measurement.

The names of rates are those of `Rates`. Compute takes the time of its FLOPs at the rate `flops`, or
the time of its memory traffic at the rate `memory`, whichever is longer. A collective takes
`launch`, plus the longer of two times: for the bytes that a device receives inside its node, and
for the bytes that enter the node. No byte is counted as received twice. Bytes over the link between
host and device take time at the rate `host`, and are no memory traffic.

An exchange kernel is a kernel that does the whole work of a collective inside a node
(`pallas_kernels._remote`). It takes as long as a collective, or `launch` plus the time of its
own arithmetic and memory traffic if that is longer.
"""

from __future__ import annotations

import dataclasses
import math
import re

from .collectives import Collective, collectives
from .instructions import Computation, Instruction, Program
from .traffic import NO_WORK, traffic

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s(?:=|":)[{\[]([\d," ]*)[}\]]')


_KERNEL = re.compile(r"dim_labels=\w+_(\w+)->")  # the labels of the dims of a convolution's kernel
# For a convolution and its two derivatives, by cuDNN's names: the places of the convolution's
# output and of its kernel. -1 is the result of the instruction, another number an operand.
_CONVOLUTIONS = {"Forward": (-1, 1), "BackwardInput": (0, 1), "BackwardFilter": (1, -1)}
_FUSED_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')
_LOGITS = re.compile(r'"intermediate_tensor_shape": ?\{[^{]*?"dimensions": ?\[([\d," ]*)\]')
_EXCHANGE = re.compile(r'"mosaic_gpu_v2".*/quantized_(?:all_gather|reduce_scatter)/')
_WINDOW = re.compile(r'"sliding_window_length": ?"?(\d+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates per second of one device, of its links, and of a node's link to other nodes.

    Attributes:
        flops: floating-point operations that matrix products in 16 bits reach.
        memory: bytes read from and written to the device's own memory.
        local: bytes that a device receives from devices of its node.
        node: bytes that enter a node of `num_local` devices.
        num_local: the number of devices of a node; not a rate.
        launch: the seconds to start a collective; not a rate.
        host: bytes between the memories of device and host, each way (PCIe 5.0 x16 reaches about
            50e9).
    """

    # The data sheet of an H200 has 989e12, 4.8e12 and 450e9; 50e9 into a node are 400 Gbit/s.
    flops: float = 700e12
    memory: float = 4.3e12
    local: float = 400e9
    node: float = 50e9
    num_local: int = 8
    launch: float = 10e-6
    host: float = 50e9


def compute_seconds(
    instruction: Instruction, within: Computation, program: Program, rates: Rates
) -> float:
    """Return the seconds of an instruction's compute and memory traffic, or of an exchange kernel.

    Copies from and to the host's memory are not counted.

    Args:
        instruction: an instruction that is no collective and no loop.
        within: the computation that holds it.
        program: the program.
        rates: the rates of the machine.
    """
    if instruction.op == "async-start":
        inner = program.computations[instruction.called["calls"][0]]
        return sum(compute_seconds(x, inner, program, rates) for x in inner.instructions)
    moved = traffic(instruction, within, program)
    seconds = max(flops(instruction, within, program) / rates.flops, moved.device / rates.memory)
    if not (received := exchanged_bytes(instruction, within, program)):
        return seconds
    return rates.launch + max(seconds, received / rates.local)


def exchanged_bytes(instruction: Instruction, within: Computation, program: Program) -> int:
    """Return the bytes that a device receives in an exchange kernel; 0 for other instructions."""
    if instruction.op == "call-start":
        inner = program.computations[instruction.called["to_apply"][0]]
        return sum(exchanged_bytes(x, inner, program) for x in inner.instructions)
    if instruction.op != "custom-call" or not _EXCHANGE.search(instruction.text):
        return 0
    # An inbox is [senders, thread blocks, slots, *tile], and what is sent [runs, pieces, tiles of
    # a run, *tile]. Each device receives as many tiles from a peer as it sends to one.
    _, codes, scales, *_ = instruction.results
    source = within.by_name[instruction.operands[0]].results[0]
    places = math.prod(codes.dims[:3])
    tile = (codes.num_bytes + scales.num_bytes) // places
    return (codes.dims[0] - 1) * source.dims[0] * source.dims[2] * tile


def collective_of(instruction: Instruction, program: Program) -> Collective | None:
    """Return the collective that an instruction runs or starts; None if it is no collective."""
    if instruction.op.endswith("-done"):
        return None
    if instruction.op == "async-start":
        inner = program.computations[instruction.called["calls"][0]]
        found = [collective_of(x, program) for x in inner.instructions]
        return next(filter(None, found), None)
    found = collectives(f"%x = {instruction.text}")
    return found[0] if found else None


def link_bytes(collective: Collective, rates: Rates) -> tuple[float, float]:
    """Return the bytes that one run of a collective moves over two kinds of links.

    Returns:
        The bytes that a device receives inside its node; and the bytes that enter a node, for all
        its devices.
    """
    if collective.op == "collective-permute":
        held = collective.entering_bytes
        apart = [a // rates.num_local != b // rates.num_local for a, b in collective.groups]
        return float(held), held * rates.num_local * sum(apart) / len(apart)
    group = collective.groups[0]
    nodes = len({device // rates.num_local for device in group})
    mine = len(group) // nodes
    in_node = collective.entering_bytes if nodes == 1 else collective.from_parts(mine)
    entering = collective.from_parts(nodes) * (rates.num_local / mine)
    return float(in_node), entering if nodes > 1 else 0.0


def collective_seconds(collective: Collective, rates: Rates) -> float:
    """Return the seconds that one run of a collective takes."""
    local, node = link_bytes(collective, rates)
    return rates.launch + max(local / rates.local, node / rates.node)


def flops(instruction: Instruction, within: Computation, program: Program) -> float:
    """Count the FLOPs of an instruction: those of products, convolutions and fused attention.

    A fusion has the FLOPs of the instructions inside of it. Other computations that an instruction
    calls, such as the body of a loop, are not counted.
    """
    if instruction.op in NO_WORK or instruction.op.endswith("-done"):
        return 0.0
    if instruction.op in ("fusion", "fusion-start"):
        within = program.computations[instruction.called["calls"][0]]
        return sum(_flops(x, within) for x in within.instructions)
    return _flops(instruction, within)


def _flops(instruction: Instruction, within: Computation) -> float:
    """Count the FLOPs of one product, convolution or fused attention; 0 for any other instruction.

    A matrix product has two FLOPs for each element of the result and each contracted index.
    """
    if labels := _KERNEL.search(instruction.text):
        return _convolution_flops(instruction, within, labels[1])
    if fused := _FUSED_ATTENTION.search(instruction.text):
        return _attention_flops(instruction, within, is_backward=fused[1].endswith("Backward"))
    is_gemm = instruction.op == "dot" or "__cublas" in instruction.text
    match = _CONTRACTED.search(instruction.text) if is_gemm else None
    if match is None:
        return 0.0
    left = within.by_name[instruction.operands[0]].results[0]
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])]
    return 2.0 * instruction.results[0].size * math.prod(left.dims[dim] for dim in dims)


def _convolution_flops(instruction: Instruction, within: Computation, labels: str) -> float:
    """Count the FLOPs of a convolution or of one of its derivatives.

    They are 2 for each element of the output and each element of the kernel that belongs to the
    same output channel. `labels` has a letter for each dim of the kernel, and "o" is the letter of
    output channels.
    """
    called = (
        places for name, places in _CONVOLUTIONS.items() if f"$conv{name}" in instruction.text
    )
    output, kernel = (
        instruction.results[0] if at < 0 else within.by_name[instruction.operands[at]].results[0]
        for at in next(called, _CONVOLUTIONS["Forward"])
    )
    return 2.0 * output.size * kernel.size / kernel.dims[labels.index("o")]


def _attention_flops(instruction: Instruction, within: Computation, *, is_backward: bool) -> float:
    """Count the FLOPs of the matrix products in cuDNN's fused attention.

    Forward has two products: queries times keys, and probabilities times values. Backward has five:
    the logits again, and the gradients of probabilities, values, queries and keys. A product takes
    2 FLOPs for each feature of each pair of a query and a key that the query sees. Pairs that a
    causal mask or a window hides are not counted, though the kernel computes some of them.
    """
    match = _LOGITS.search(instruction.text)
    if match is None:
        return 0.0
    rows, heads, queries, keys = (int(x) for x in re.findall(r"\d+", match[1]))
    pairs = queries * keys
    if "CAUSAL" in instruction.text:
        first = min(queries, keys)  # queries from here on see all keys
        window = _WINDOW.search(instruction.text)
        hidden = max(first - int(window[1]), 0) if window and int(window[1]) else 0
        pairs = first * (first + 1) // 2 + (queries - first) * keys - hidden * (hidden + 1) // 2
    query, _, value = (within.by_name[x].results[0].dims[-1] for x in instruction.operands[:3])
    products = 3 * query + 2 * value if is_backward else query + value
    return 2.0 * rows * heads * pairs * products
