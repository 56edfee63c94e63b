"""The schedule of freezing, against the formula as PipeTransformer's code has it."""

import fractions
import math

import pytest

import jaxzero as jz


def _published(num_layers, alpha, epoch):
    """The formula of the released code, in exact numbers."""
    if epoch == 0:
        return 0
    rest = 1 - alpha
    total = alpha * num_layers / rest + sum(
        alpha * num_layers / rest**t for t in range(2, epoch + 1)
    )
    return math.ceil(rest**epoch * total)


@pytest.mark.parametrize("num_layers", [1, 2, 6, 12, 24, 33])
@pytest.mark.parametrize("alpha", [fractions.Fraction(1, 3), fractions.Fraction(1, 2)])
def test_it_follows_the_formula_in_few_changes(num_layers, alpha):
    schedule = jz.freeze_schedule(num_layers, float(alpha))
    frozen = [schedule(epoch) for epoch in range(40)]
    assert frozen[0] == 0 and frozen == sorted(frozen)
    assert len(set(frozen)) - 1 <= math.log2(num_layers)
    halved = {num_layers - (num_layers >> k) for k in range(num_layers.bit_length())}
    for epoch, num in enumerate(frozen):
        published = _published(num_layers, alpha, epoch)
        assert num == max(x for x in halved if x <= published)
    assert frozen[-1] == num_layers - 1  # one layer is active at the end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`num_layers`.*got 0"),
        ((True,), "`num_layers`.*got True"),
        ((4, 1.0), "`alpha`.*1.0"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        jz.freeze_schedule(*arguments)
    with pytest.raises(ValueError, match="`epoch`.*-1"):
        jz.freeze_schedule(4)(-1)
