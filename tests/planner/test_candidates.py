"""Which plans are compiled at the same time."""

import dataclasses

import jaxzero as jz
from jaxzero._planner.candidates import enumerate_candidates, tells_more

CLUSTER = jz.Cluster(nodes=2, local=2, device="h200", link=25e9)


def test_each_form_of_the_loss_has_a_program_before_one_has_two():
    plans = {x.name: x for x in enumerate_candidates(CLUSTER, ("",), (1,), False)}
    first, second = plans["zero3, prefetch 1"], plans["hsdp, prefetch 1"]
    other = dataclasses.replace(second, loss="other")
    assert tells_more(second, [first], [], {""})
    assert not tells_more(first, [first], [], {""})  # its program is being compiled
    assert not tells_more(second, [first], [], {"", "other"})
    assert tells_more(other, [first], [], {"", "other"})
    assert tells_more(second, [first], [other], {"", "other"})
    assert tells_more(second, [], [first], {"", "other"})
