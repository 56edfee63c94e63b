"""Windows cover an array, each element in one window that counts it."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies

from jaxzero._windowed_update.windows import Windows


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    shape=strategies.lists(strategies.integers(1, 7), min_size=0, max_size=4).map(tuple),
    window_bytes=strategies.integers(1, 3000),
)
def test_windows_cover_an_array_once(shape, window_bytes):
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(jnp.zeros(shape, jnp.float32), host)
    windows = Windows.of([x], window_bytes)
    assert np.prod(windows.window_shape) * 4 <= max(window_bytes, 4)
    count = np.zeros(shape)
    ends = []
    for i in range(len(windows)):
        starts = [int(start) for start in windows.starts(i)]
        part = tuple(
            slice(start, start + n) for start, n in zip(starts, windows.window_shape, strict=True)
        )
        new = windows.is_new(i)
        assert count[part].shape == windows.window_shape  # it does not reach over the end
        count[part] += 1 if new is None else np.asarray(new)
        ends.append(np.ravel_multi_index([s.stop - 1 for s in part], shape) if shape else 0)
    np.testing.assert_array_equal(count, 1)
    assert ends == sorted(set(ends))  # so an overlap is with the window before only


def test_arrays_in_device_memory_are_one_window():
    assert Windows.of([jnp.zeros((4, 8))], 1).is_all
