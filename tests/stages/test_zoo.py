"""The zoo's scanned and listed models as pipelines, against one device."""

from __future__ import annotations

import pytest

import jaxzero as jz
from tests.zoo import CASES, check

_LAYERS = {
    "linen_decoder_in_a_scan_with_remat": "params.ScanCheckpoint_LinenBlock_0",
    "nnx_decoder_with_remat": "blocks.*",
    "scanned_layers_with_a_scalar_each": ("w", "b", "gain"),
    "linen_decoder_in_a_scan": "params.Scan_LinenBlock_0",
    "nnx_decoder_in_a_scan": "blocks",
    "scanned_layers": ("w", "b"),
    "scanned_over_time_inside_scanned_layers": ("w", "b"),
    "scanned_with_split_transpose": ("w", "b"),
}


@pytest.mark.parametrize("name", _LAYERS)
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.one_in(12)
def test_a_step_of_the_zoo_is_that_of_one_device(nodes, name):
    if nodes == 4 and "decoder" in name:
        pytest.skip("2 or 3 layers on 4 stages are refused")
    check(CASES[name], jz.Zero(jz.make_mesh(nodes), jz.pipeline(2, _LAYERS[name])))
