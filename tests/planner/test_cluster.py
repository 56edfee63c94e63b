"""Clusters: what is refused, and the shares of nodes of different speeds in a batch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import jaxzero as jz


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "`nodes` of `Cluster` must be an integer of at least 1; got 0"),
        ({"device": ("h100", "a100", "a100")}, "with one for each of 2 nodes; got"),
        ({"device": "v5e"}, "`device` of `Cluster` must be one of a100, .*; got 'v5e'"),
        ({"link": 50.0}, "`link` of `Cluster` is bytes a second; 50 is less than a megabyte"),
        ({"host_memory": -1.0}, "`host_memory` of `Cluster` must be at least 0 bytes"),
    ],
)
def test_clusters(options, message):
    with pytest.raises(ValueError, match=message):
        jz.Cluster(**{"nodes": 2, "local": 2, **options})


def _mixed(*speeds):
    kind = jz.Cluster(nodes=1, local=2, device="h100").kind
    devices = tuple(dataclasses.replace(kind, flops=1e12 * speed) for speed in speeds)
    return jz.Cluster(nodes=len(speeds), local=2, device=devices)


@pytest.mark.parametrize(
    ("speeds", "microbatches", "shares"),
    [
        ((1.0, 1.0), 8, (1, 1)),
        ((1.0, 0.5), 8, (2, 1)),
        ((0.5, 1.0), 3, (1, 3)),  # 1.5 of 3 would keep the first node waiting for less
        ((3.0, 2.0, 3.0), 12, (3, 2, 3)),
        ((1.0, 0.3), 4, (4, 1)),
        ((1.0, 0.9), 4, (1, 1)),  # a whole one less of 4 costs more than waiting
        ((1.0, 0.01), 2, (2, 1)),  # every node has one
    ],
)
def test_shares_of_nodes(speeds, microbatches, shares):
    assert _mixed(*speeds).shares(microbatches) == shares


def test_shares_compute_most_rows_a_second():
    speeds = 1.0, 0.7, 0.35
    found = _mixed(*speeds).shares(8)

    def rows_a_second(shares):
        return sum(shares) / max(x / speed for x, speed in zip(shares, speeds, strict=True))

    possible = itertools.product((1, 2, 4, 8), range(1, 9), range(1, 9))
    best = max(rows_a_second(x) for x in possible if max(x) == x[0])
    assert rows_a_second(found) == pytest.approx(best)


def test_shares_of_no_micro_batches_are_refused():
    with pytest.raises(ValueError, match="`microbatches` must be an integer of at least 1; got 0"):
        jz.Cluster(nodes=2, local=2).shares(0)


def test_gpus_without_a_compiler():
    """AMD's modules: https://www.amd.com/en/products/accelerators/instinct.html."""
    cluster = jz.Cluster(nodes=2, local=8, device="mi300x")
    assert cluster.rates.flops < 1307.4e12 and cluster.kind.memory == 192e9
    assert cluster.kind.target is None
