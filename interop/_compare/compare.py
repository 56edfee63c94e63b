"""Run a JAX and a PyTorch model on the same inputs, and compare their outputs by name."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxzero._first_use import extra_for
from jaxzero._text import first_names
from jaxzero.interop._rules import Rule

from .pairs import Pair, pairs_of
from .result import ComparedOutput, Comparison
from .runs import (
    Calls,
    Named,
    TorchCall,
    call,
    calls_in,
    jax_array,
    map_arrays,
    named_arrays,
    recorded,
    run_torch,
    submodules_of,
)

_FACTOR = 2.0  # both models round: see `bound` in `compare`
_USELESS = 0.5  # a bound so large that zeros, or the outputs of other weights, may be within it
_RECORD = (
    "Pass the model, as `jax_module`, whose submodules are called in `function`; or let `function` "
    'return `(outputs, intermediates)`: of Linen `model.apply(variables, x, mutable="intermediates"'
    ", capture_intermediates=True)`, or arrays by name."
)


def compare(
    function: Callable[..., Any],
    module: Any,
    inputs: Any,
    *,
    torch_inputs: Any = None,
    output: str | None = None,
    submodules: bool | Mapping[str, str] | Iterable[Rule] = False,
    jax_module: Any = None,
    dtype: np.typing.DTypeLike | None = None,
) -> Comparison:
    """Compare what a JAX function and a PyTorch module compute from the same inputs.

    It shows whether a checkpoint was converted rightly, also where shapes and names cannot: the
    order of flattened dimensions, of rotary pairs and of fused heads, and settings such as epsilon.
    The module runs in evaluation mode and without gradients; afterwards its mode is restored. The
    function runs with `jax.default_matmul_precision("highest")`. Turn off dropout in the function.

    Args:
        function: a JAX function, or a model that can be called. Its parameters must be full arrays
            (`zero.unshard`).
        module: a `torch.nn.Module`.
        inputs: what `function` and `module` are called with: a tuple or list of positional
            arguments, a dict of named arguments, or a single argument. Arrays and tensors in it are
            converted for each library; integers become int64 tensors.
        torch_inputs: inputs of `module`, if it needs other inputs than `function`, such as images
            in NCHW.
        output: name of the output of `module` to compare, such as "logits", where it has several
            and `function` has one.
        submodules: how submodules of the two models correspond; their outputs are compared too.
            True: by equal names. A dict: from names in the JAX model to names in PyTorch, such as
            `{"layers.{i}.up": "h.{i}.mlp.fc"}`. Rules as for `load_into`: by the names of their
            parameters, and with the reordering of features that the steps of a rule describe.
            The output of a submodule in JAX may be laid out as in PyTorch, with channels last, with
            heads after tokens, or as its rule says: the layout that fits best is compared, and
            noted. If the outputs of the two models as a whole have the same shape, they are
            compared as they are.
        jax_module: the model of Flax NNX, Equinox or plain classes whose submodules `function`
            calls; by default `function` itself, or the object that the method `function` is bound
            to. If there is no such model, `function` must return `(outputs, intermediates)`;
            `intermediates` holds arrays in nested dicts by name, as `capture_intermediates` of
            Linen, `nnx.capture` or a function of yours makes them.
        dtype: dtype in which the models compute, if it is coarser than the dtypes of the outputs
            and of the module's parameters.

    Returns:
        A `Comparison`: `print` it, or `assert result.agrees, result`. A difference is the largest
        absolute one, divided by the largest absolute value of PyTorch's output. Its bound is

            2 sqrt(n) (eps + sqrt(k) eps_sum)

        `n` counts the parameters, and the submodules without parameters, that were used up to this
        output. Each rounds once, by up to `eps` / 2 and independently of the others, so the error
        grows with the root of `n`. `k` is the number of terms in the longest sum up to this output,
        such as over the inputs of a linear layer or the features of a norm; its error grows with
        the root of `k`. `eps` is the machine epsilon of the coarsest floating-point dtype among
        both outputs, the parameters of `module` and `dtype`. `eps_sum` is the same, or float32's if
        that dtype has 16 bits. The factor 2 covers both models, the largest of many elements, and
        what is computed between submodules. Integers must be equal. A wrong setting may stay within
        the bound: in float32 an epsilon of 1e-6 or of 1e-5 gives the same where variances are about
        1; in float64 it does not (`jax.enable_x64()`, `module.double()`).

    Raises:
        ImportError: PyTorch is not installed.
        TypeError: `module` is no `torch.nn.Module`, or `function` cannot be called.
        ValueError: there is nothing to compare: `output` is needed, or no name of `submodules`
            fits; or the dtype is so coarse that the bound is 0.5 or more.
    """
    _check(function, module)
    model = getattr(function, "__self__", function) if jax_module is None else jax_module
    returns_both = submodules is not False and not submodules_of(model)
    with contextlib.ExitStack() as stack:
        # By default, GPUs and TPUs multiply float32 with fewer bits, beyond the bound.
        stack.enter_context(jax.default_matmul_precision("highest"))
        calls: Calls = {}
        if submodules is not False and not returns_both:
            # Submodules are recognised by their arrays, which are tracers inside a `jit`.
            stack.enter_context(jax.disable_jit())
            calls = stack.enter_context(recorded(model))
        ours = call(function, map_arrays(jax_array, inputs))
    if returns_both:
        ours, calls = _both(ours)
    given = inputs if torch_inputs is None else torch_inputs
    theirs, torch_calls = run_torch(module, given, record=submodules is not False)
    kinds = {str(each.dtype).removeprefix("torch.") for each in module.parameters()}
    dtypes = [jnp.dtype(kind) for kind in kinds] + ([] if dtype is None else [jnp.dtype(dtype)])
    rows: list[ComparedOutput] = []
    alone: tuple[list[str], list[str]] = ([], [])
    if submodules is not False:
        dims = {name: each.ndim for name, each in module.named_parameters()}
        rows = _submodules(submodules, calls, torch_calls, dims, dtypes, alone)
    rows += _outputs(named_arrays(ours), named_arrays(theirs), output, torch_calls, dtypes, alone)
    for row in rows:
        if row.bound >= _USELESS:
            raise ValueError(
                f"{row.dtype} is too coarse to tell anything of `{row.torch_name}`: rounding alone "
                f"may make {row.bound:.1f} of its largest value. Compare both in float32: "
                "`module.float()`, and parameters and activations of float32 in `function`."
            )
    return Comparison(tuple(rows), tuple(alone[0]), tuple(alone[1]))


def _check(function: Any, module: Any) -> None:
    with extra_for("Comparing with PyTorch needs", "torch"):
        import torch
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"`module` must be a `torch.nn.Module`; got {type(module).__name__}.")
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise TypeError(
            f"`function` must be a function or model of JAX; got {type(function).__name__}."
        )


def _both(returned: Any) -> tuple[Any, Calls]:
    calls = calls_in(returned[1]) if isinstance(returned, tuple) and len(returned) == 2 else {}
    if not calls:
        raise ValueError(f"`submodules` needs the outputs of ours by name. {_RECORD}")
    return returned[0], calls


def _submodules(
    names: Any,
    calls: Calls,
    torch_calls: list[TorchCall],
    dims: Mapping[str, int],
    dtypes: list[Any],
    alone: tuple[list[str], list[str]],
) -> list[ComparedOutput]:
    """Compare the outputs of submodules; return a row for each call, in PyTorch's order.

    Names of submodules that were not compared are added to the lists in `alone`: names of PyTorch
    to the first list, names of the JAX model to the second.

    Args:
        names: the argument `submodules` of `compare`.
        calls: outputs of the JAX model's submodules.
        torch_calls: calls of PyTorch's submodules.
        dims: name of a parameter of PyTorch -> its number of dimensions.
        dtypes: dtypes that the bounds depend on, besides those of the outputs.
        alone: two lists, for names that were not compared.
    """
    theirs: dict[str, list[tuple[int, TorchCall]]] = {}
    for place, their_call in enumerate(torch_calls):
        if their_call.array is not None:
            theirs.setdefault(their_call.name, []).append((place, their_call))
    pairs = pairs_of(names, calls, theirs, dims)
    if not pairs:
        raise ValueError(
            f"No name of `submodules` fits: ours were called {_shown(calls)}; those of PyTorch "
            f"{_shown(theirs)}. Leave it out to compare outputs only. {'' if calls else _RECORD}"
        )
    lengths: dict[str, list[tuple[int, ...]]] = {}  # our name -> least sizes of its stack
    for pair in pairs:
        lengths.setdefault(pair.ours, []).append(tuple(n + 1 for n in pair.index))
    rows, paired = [], (set(), set())
    for pair in pairs:
        last = [theirs[name] for name in pair.theirs]
        ours = calls[pair.ours]
        if len(last[0]) == 1 and len(ours) > 1:  # a vmap calls ours for each example
            ours = [np.stack(ours)]
        if any(each.shape[: len(pair.index)] != max(lengths[pair.ours]) for each in ours):
            continue  # the parameters are stacked, but the submodule's output has no such dimension
        paired[0].update(pair.theirs)
        paired[1].add(pair.ours)
        ours = [each[pair.index] for each in ours]
        for number, (mine, *others) in enumerate(zip(ours, *last, strict=False)):
            place, end = max(others, key=lambda each: each[0])
            outputs = [each.array for _, each in others if each.array is not None]
            suffix = f" (call {number + 1})" if len(ours) > 1 else ""
            row = _row(pair, mine, outputs, end, dtypes, suffix)
            rows.append((place, row))
        if any(len(each) != len(ours) for each in last):
            alone[0].append(f"{pair.theirs[0]} (called {len(last[0])} times, ours {len(ours)})")
    alone[0].extend(name for name in theirs if name not in paired[0])
    alone[1].extend(name for name in calls if name not in paired[1])
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _outputs(
    ours: Named,
    theirs: Named,
    output: str | None,
    torch_calls: list[TorchCall],
    dtypes: list[Any],
    alone: tuple[list[str], list[str]],
) -> list[ComparedOutput]:
    """Compare the outputs of the two models; return a row for each.

    Names of outputs that were not compared are added to `alone`, as in `_submodules`.
    """
    held = theirs.arrays
    if output is not None:
        chosen = {name: x for name, x in held.items() if f"{name}.".startswith(f"{output}.")}
        if not chosen:
            raise ValueError(f"`output` {output!r} is none of {_shown(held)}.")
        alone[0].extend(f"output.{name}" for name in held if name not in chosen)
        held = {name.removeprefix(output).removeprefix("."): x for name, x in chosen.items()}
    if len(ours.arrays) == 1 and len(held) == 1:
        names = [(*ours.arrays, *held)]
    else:
        names = [(name, name) for name in ours.arrays if name in held]
    if not names:
        raise ValueError(
            f"Outputs of `function` are {_shown(ours.arrays)}; of `module` {_shown(held)}: no name "
            "is the same. Name that of `module` in `output`, or return a dict with its names."
        )
    for side, named, known in ((0, theirs, held), (1, ours, ours.arrays)):
        rest = [name for name in known if name not in {each[1 - side] for each in names}]
        alone[side].extend(_of_output(name) for name in (*rest, *named.others))
    rows = []
    for mine, other in names:
        full = ".".join(name for name in (output, other) if name)
        pair = Pair(_of_output(mine), (), (_of_output(full),), (), 0)
        given = (pair, ours.arrays[mine], [held[other]], torch_calls[-1], dtypes)
        rows.append(_row(*given, of_model=True))
    return rows


def _shown(names: Iterable[str]) -> str:
    return first_names([name or "the only one" for name in names]) or "none"


def _of_output(name: str) -> str:
    return f"output.{name}" if name else "output"


def _row(
    pair: Pair,
    ours: np.ndarray,
    outputs: list[np.ndarray],
    end: TorchCall,
    dtypes: list[Any],
    suffix: str = "",
    of_model: bool = False,
) -> ComparedOutput:
    readings = {
        layout: reading
        for layout, each in pair.readings(outputs).items()
        if (reading := _in_shape_of(ours, each)) is not None
    }
    if of_model and ours.shape == outputs[0].shape:
        readings = {"": outputs[0]}
    differences = {layout: difference_of(ours, each) for layout, each in readings.items()}
    dtype, bound = bound_of([ours.dtype, *(x.dtype for x in outputs), *dtypes], end)
    comparable = {layout: each for layout, each in differences.items() if not math.isnan(each)}
    best = min(comparable, key=comparable.__getitem__, default="")
    notes = [f"shape in PyTorch: {list(x.shape)}" for x in outputs if x.shape != ours.shape]
    notes += [f"compared {best}"] if best else []
    if comparable and comparable[best] > bound > 0:
        scale = _scale(ours, readings[best], bound)
        notes += [f"PyTorch's is {scale:.6g} times ours"] if scale else []
    return ComparedOutput(
        torch_name=" + ".join(pair.theirs) + suffix,
        jax_name=pair.ours + (str(list(pair.index)) if pair.index else "") + suffix,
        shape=ours.shape,
        dtype=dtype,
        difference=comparable[best] if comparable else math.nan if differences else math.inf,
        bound=bound,
        note="; ".join(notes),
        of_model=of_model,
    )


def _in_shape_of(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """Reshape PyTorch's output to the shape of ours; return None if the two cannot be compared.

    PyTorch's output is returned unchanged if ours broadcasts to it. For example, our
    embeddings of positions may have size 1 in the dimension of rows, being equal for all rows.
    """
    if ours.size == theirs.size:
        return theirs.reshape(ours.shape)
    fits = ours.ndim == theirs.ndim and all(
        n in (1, m) for n, m in zip(ours.shape, theirs.shape, strict=True)
    )
    return theirs if fits else None


def _scale(ours: np.ndarray, theirs: np.ndarray, bound: float) -> float | None:
    """Return a factor that makes our output equal PyTorch's within the bound; None if none does."""
    if ours.shape != theirs.shape or not ours.size:
        return None
    place = np.unravel_index(np.abs(ours).argmax(), ours.shape)
    if not ours[place] or not np.isfinite(ours[place]):
        return None
    scale = float((theirs[place] / ours[place]).real)
    return scale if difference_of(ours * scale, theirs) <= bound else None


def bound_of(dtypes: Iterable[Any], end: TorchCall) -> tuple[str, float]:
    """Return the coarsest dtype, and the bound of the difference; the formula is in `compare`.

    Args:
        dtypes: the dtype of our output, then the other dtypes that the bound depends on.
        end: the call that made PyTorch's output; it has the number of roundings up to its end.
    """
    dtypes = list(dtypes)
    if not jnp.issubdtype(dtypes[0], jnp.inexact):
        return dtypes[0].name, 0.0
    coarsest = max((x for x in dtypes if jnp.issubdtype(x, jnp.inexact)), key=_eps)
    eps = _eps(coarsest)
    eps_sum = min(eps, _eps(np.float32)) if coarsest.itemsize < 4 else eps
    factor = _FACTOR * math.sqrt(end.num_roundings)
    return coarsest.name, factor * (eps + math.sqrt(end.longest_sum) * eps_sum)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def difference_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest absolute difference, divided by the largest absolute value of `theirs`.

    NaN if either holds a NaN; infinite if integers differ, or only one holds an infinity.
    """
    if not jnp.issubdtype(ours.dtype, jnp.inexact):
        return 0.0 if np.array_equal(ours, theirs) else math.inf
    kind = np.complex128 if np.iscomplexobj(ours) or np.iscomplexobj(theirs) else np.float64
    ours, theirs = np.broadcast_to(ours.astype(kind), theirs.shape), theirs.astype(kind)
    if np.isnan(ours).any() or np.isnan(theirs).any():
        return math.nan
    is_finite = np.isfinite(ours) & np.isfinite(theirs)
    if not np.array_equal(ours[~is_finite], theirs[~is_finite]):
        return math.inf
    ours, theirs = ours[is_finite], theirs[is_finite]
    distance = float(np.abs(ours - theirs).max(initial=0))
    scale = float(np.abs(theirs).max(initial=0))
    return distance / scale if scale else math.inf if distance else 0.0
