"""Errors to plant in jaxzero, and what each spoils. Each replaces one function of the library."""

import types

import jax
import jax.numpy as jnp
from jax import lax

import jaxzero as jz
from jaxzero._collectives import comm_spec, encoded_shards, reduce_hop, reductions
from jaxzero._execute import buckets, mean_gradients, microbatches
from jaxzero._mesh import LOCAL, NODE
from jaxzero._zero import outputs, sharded_trees, transform

GRADIENTS = {"first", "layers", "bias", "padded"}
SQUARE = {"first"}
FAULTS = {}


def _fault(wrong, cause="step", **options):
    """Register a fault: the results that it spoils (all of them, or a set of which one is)."""

    def enter(plant):
        FAULTS[plant.__name__] = (plant, wrong, cause, options)
        return plant

    return enter


def _replace(patch, module, name, make):
    patch.setattr(module, name, make(getattr(module, name)))


# Means and sums over devices.


@_fault(GRADIENTS)
def mean_over_nodes_only(patch):
    patch.setattr(comm_spec.CommSpec, "divisor", property(lambda self: self.sizes[NODE]))


def _without_sum(patch, dropped):
    def make(reduce_scatter):
        def changed(x, axis, dim, shares=()):
            if axis != dropped:
                return reduce_scatter(x, axis, dim, shares)
            num = lax.axis_size(axis)
            size = x.shape[dim] // num
            start = lax.axis_index(axis) * size
            return num * lax.dynamic_slice_in_dim(x, start, size, dim)

        return changed

    _replace(patch, reduce_hop, "reduce_scatter", make)
    _replace(patch, reductions, "reduce_scatter", make)


@_fault(GRADIENTS)
def no_sum_over_nodes(patch):
    _without_sum(patch, NODE)


@_fault(GRADIENTS)
def no_sum_inside_a_node(patch):
    _without_sum(patch, LOCAL)


@_fault(GRADIENTS)
def sums_in_bfloat16(patch):
    def make(reduce_scatter):
        def changed(x, *args):
            return reduce_scatter(x, *args).astype(jnp.bfloat16).astype(x.dtype)

        return changed

    _replace(patch, reduce_hop, "reduce_scatter", make)
    _replace(patch, reductions, "reduce_scatter", make)


@_fault(GRADIENTS)
def numbers_in_shards_rotated(patch):
    def make(reduce_scatter):
        def changed(x, axis, dim, shares=()):
            shard = reduce_scatter(x, axis, dim, shares)
            return jnp.roll(shard.reshape(-1), 1).reshape(shard.shape)

        return changed

    _replace(patch, reduce_hop, "reduce_scatter", make)
    _replace(patch, reductions, "reduce_scatter", make)


@_fault({"loss"})
def loss_of_one_node(patch):
    patch.setattr(mean_gradients, "sum_over_devices", lambda x, comm: lax.psum(x, LOCAL))


@_fault({"loss"}, weighted=True)
def weight_of_one_device(patch):
    def make(sum_over_devices):
        calls = []

        def changed(x, comm):
            calls.append(x)
            return 8 * x if len(calls) % 2 == 0 else sum_over_devices(x, comm)

        return changed

    _replace(patch, mean_gradients, "sum_over_devices", make)


# Weights.


def _gathered(patch, change):
    def make(all_gather):
        def changed(x, axis, dim, *args, **kwargs):
            return change(all_gather(x, axis, dim, *args, **kwargs), x, axis, dim)

        return changed

    _replace(patch, encoded_shards, "all_gather", make)


@_fault({"loss"})
def nodes_in_another_order(patch):
    def change(full, shard, axis, dim):
        return jnp.roll(full, shard.shape[dim], dim) if axis == NODE else full

    _gathered(patch, change)


@_fault({"loss"})
def devices_of_a_node_in_another_order(patch):
    def change(full, shard, axis, dim):
        return jnp.roll(full, shard.shape[dim], dim) if axis == LOCAL else full

    _gathered(patch, change)


@_fault({"loss"})
def own_slice_for_that_of_others(patch):
    def change(full, shard, axis, dim):
        num = full.shape[dim] // shard.shape[dim]
        return jnp.concatenate([shard] * num, dim) if axis == NODE else full

    _gathered(patch, change)


@_fault({"loss"})
def one_device_keeps_a_stale_slice(patch):
    def change(full, shard, axis, dim):
        is_stale = (lax.axis_index(NODE) == 1) & (lax.axis_index(LOCAL) == 2)
        return jnp.where(is_stale, jnp.roll(full, 1, dim), full)

    _gathered(patch, change)


@_fault({"loss"})
def a_square_weight_transposed(patch):
    def make(join):
        def changed(self, dtype=None):
            x = join(self, dtype)
            return x.T if x.ndim == 2 and x.shape[0] == x.shape[1] else x

        return changed

    _replace(patch, encoded_shards.EncodedShards, "join", make)


@_fault({"loss"})
def weights_in_bfloat16(patch):
    def make(join):
        def changed(self, dtype=None):
            x = join(self, dtype)
            return x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x

        return changed

    _replace(patch, encoded_shards.EncodedShards, "join", make)


@_fault({"loss"})
def padding_that_leaks(patch):
    """The zeros at the end come first, and the last numbers are cut off."""

    def make(unpad):
        return lambda x, layout: unpad(jnp.roll(x, 1, layout.dim), layout)

    _replace(patch, buckets, "unpad", make)


# Gradients of leaves.


def _changed_gradients(patch, change):
    def make(all_gradients):
        def changed(self, *args):
            found = all_gradients(self, *args)
            paths = [self.parameters.leaves[i].path for i in self.differentiated]
            return change(dict(zip(paths, found, strict=True)))

        return changed

    _replace(patch, transform.Transform, "_all_gradients", make)


@_fault({"bias"})
def one_gradient_dropped(patch):
    _changed_gradients(patch, lambda x: list((x | {"bias": jnp.zeros_like(x["bias"])}).values()))


@_fault({"layers"})
def gradients_of_the_next_layer(patch):
    _changed_gradients(
        patch, lambda x: list((x | {"layers": jnp.roll(x["layers"], 1, 0)}).values())
    )


@_fault({"first"})
def one_gradient_transposed(patch):
    _changed_gradients(patch, lambda x: list((x | {"first": x["first"].T}).values()))


@_fault({"first"})
def one_element_not_sent(patch):
    _changed_gradients(patch, lambda x: list((x | {"first": x["first"].at[3, 5].set(0)}).values()))


@_fault({"bias"})
def order_of_a_bucket_swapped(patch):
    _changed_gradients(patch, lambda x: list((x | {"bias": x["bias"][::-1]}).values()))


# Micro-batches and random numbers.


@_fault(GRADIENTS, microbatches=3)
def only_the_last_micro_batch_counts(patch):
    changed = types.SimpleNamespace(**vars(jnp))
    changed.add = lambda x, y: y
    patch.setattr(microbatches, "jnp", changed)


@_fault({"loss"}, microbatches=3)
def a_micro_batch_taken_twice(patch):
    def make(split):
        def changed(x, spec, num):
            rows = split(x, spec, num)
            return rows.at[1].set(rows[0])

        return changed

    _replace(patch, microbatches, "split_microbatches", make)


@_fault({"loss"}, random=True)
def one_device_with_another_key(patch):
    def make(rebuild):
        def changed(self, stored, inputs):
            is_other = (lax.axis_index(NODE) == 1) & (lax.axis_index(LOCAL) == 3)

            def other(x):
                if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                    return x
                return jax.random.fold_in(x, is_other.astype(jnp.uint32))

            return rebuild(self, stored, list(map(other, inputs)))

        return changed

    _replace(patch, transform.Transform, "_rebuild", make)


# Outputs.


@_fault({"aux count"}, aux=True)
def sums_combined_as_means(patch):
    def make(combine):
        return lambda x, how, comm: combine(x, "mean" if how == "sum" else how, comm)

    _replace(patch, outputs, "combine", make)


@_fault({"aux largest"}, aux=True)
def a_minimum_for_a_maximum(patch):
    def make(combine):
        def changed(x, how, comm):
            if how == "max":
                return lax.pmin(x.min(), (NODE, LOCAL))
            return combine(x, how, comm)

        return changed

    _replace(patch, outputs, "combine", make)


# Updates.


@_fault({"layers"}, cause="update")
def an_update_of_a_stale_parameter(patch):
    def make(apply):
        def changed(tx, grads, state, params, *args):
            new, state = apply(tx, grads, state, params, *args)
            return new | {"layers": params["layers"]}, state

        return changed

    _replace(patch, sharded_trees, "apply_gradients", make)


@_fault({"first", "layers", "bias"}, cause="update")
def updates_with_the_wrong_sign(patch):
    def make(apply):
        def changed(tx, grads, *args):
            return apply(tx, jax.tree.map(lambda x: -x, grads), *args)

        return changed

    _replace(patch, sharded_trees, "apply_gradients", make)


# Codecs.

_INT8 = jz.Int8(block=32, scale_dtype="float32")
ENCODED = jz.ZeroConfig(
    weights=jz.PerAxis(node=_INT8, local=_INT8),
    gradients=jz.PerAxis(node=_INT8, local=_INT8),
    min_quantized_size=128,
)


def _scaled(patch, method, factor):
    patch.setattr(
        jz.Int8,
        method,
        lambda self, *args, **kwargs: (
            getattr(super(jz.Int8, self), method)(*args, **kwargs) * factor
        ),
    )


@_fault({"first", "layers"}, cause="codecs", config=ENCODED)
def a_wrong_scale_of_gradients(patch):
    _scaled(patch, "decode_sum", 0.5)


@_fault({"loss"}, cause="codecs", config=ENCODED)
def a_wrong_scale_of_weights(patch):
    _scaled(patch, "decode_pieces", 1.5)


@_fault({"first", "layers"}, cause="codecs", config=ENCODED)
def messages_of_gradients_lost(patch):
    _scaled(patch, "decode_sum", 0.0)
