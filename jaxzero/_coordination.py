"""What processes tell each other beside the arrays: strings, through JAX's coordination service.

Unlike a collective it needs no devices, may run in any thread, and ends after a given time.
"""

from __future__ import annotations

import time

import jax
from jax._src import distributed


def exchange(name: str, value: str, seconds: float) -> list[str]:
    """Give every process what each of them gave. Collective.

    Args:
        name: of this exchange, never used before in the life of the processes.
        value: of this process.
        seconds: to wait for the others.

    Returns:
        The values by process.

    Raises:
        TimeoutError: a process did not come in time.
    """
    if jax.process_count() == 1:
        return [value]
    client = distributed.global_state.client
    assert client is not None
    client.key_value_set(f"jaxzero/{name}/{jax.process_index()}", value)
    until, values = time.monotonic() + seconds, []
    for number in range(jax.process_count()):
        left = max(int(1000 * (until - time.monotonic())), 1)
        try:
            values.append(client.blocking_key_value_get(f"jaxzero/{name}/{number}", left))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(
                f"Process {number} did not come to {name!r} within {seconds:g} s."
            ) from error
    return values
