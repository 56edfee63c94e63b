"""`LocalRounds`, the result of `Zero.local_steps`, runs rounds of local steps on every node."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from .._local_steps import Carry, Inner, LocalSteps, Outer, run_round
from .._mesh import NODE, NodeMesh, SimulatedMesh, is_traced, map_nodes
from .._report import LocalReport
from .._sharding import (
    TreeLayout,
    arrays_of,
    of_arrays,
    overwritten_leaves,
    stored_leaf,
    trained_leaves,
)
from .local_state import (
    FIELDS,
    Arrays,
    Kept,
    Layouts,
    LocalState,
    first_arrays,
    for_nodes,
    gathered_mean,
    mean_over_nodes,
)
from .local_step import LocalStep, batch_specs, check_kept, node_specs, warn_of_codec
from .padding_check import warn_of_padding
from .placement import (
    auto_mesh,
    constrain,
    constrain_tree,
    pad_leaf,
    run_automatic,
    stored_struct,
    unpad_leaf,
)
from .programs import run_straight_through
from .sharded_trees import ShardedTrees

_OF_OUTER = (
    "Take an `outer` optimizer that updates each element by itself, such as `optax.sgd`, or nodes "
    "whose number of devices divides a dim of these leaves."
)


class LocalRounds:
    """A function that runs one round of local steps; made by `Zero.local_steps`.

    In a round, every node takes `method.every` training steps on its own rows, and nodes exchange
    their parameters as `method` says.
    """

    def __init__(self, step: Callable[..., Any], method: LocalSteps, zero: ShardedTrees):
        if not callable(step):
            raise ValueError(
                "`step` must be a function `step(params, opt_state, batch)`, which returns "
                f"`(params, opt_state, metrics)`; got {step!r}."
            )
        self.method = method
        self._step = step
        self._zero = zero
        assert not isinstance(zero._devices, NodeMesh)
        self._mesh = zero._devices
        self._layouts: Layouts | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._mesh.shape[NODE]

    def init(self, params: Any, opt_state: Any) -> LocalState:
        """Make the state before the first round. Every node starts from `params` and `opt_state`.

        Args:
            params: from `zero.init` or `zero.shard`.
            opt_state: from `zero.init_optimizer`, or any tree of arrays that `zero` has laid out.

        Raises:
            ValueError: a tree did not come from this `Zero`, or the state of the outer
                optimizer (`method.outer`) cannot be cut into fragments.
            NotImplementedError: a leaf is stored encoded or is split over further mesh axes.
        """
        tree_layouts = self._zero._layout_of(params), self._zero._layout_of(opt_state)
        layouts = self._lay_out(params, *tree_layouts)
        mesh = auto_mesh(self._zero.mesh)

        def make(trees: list[list[Array]]) -> Arrays:
            kept = layouts.kept["params"], layouts.kept["opt_state"]
            inner, state = (
                [
                    # Replicate over nodes first: then a copy for each node moves nothing.
                    constrain(pad_leaf(new, unpad_leaf(old, x)), mesh, new.spec(after.axes))
                    for old, new, x in zip(before.leaves, after.leaves, arrays, strict=True)
                ]
                for before, after, arrays in zip(tree_layouts, kept, trees, strict=True)
            )
            return for_nodes(first_arrays(layouts, inner, state), layouts, self.num_nodes)

        trees = [arrays_of(params), arrays_of(opt_state)]
        return self._made(layouts, make, trees)

    def abstract(self, params: Any, opt_state: Any, *, nodes: int | None = None) -> LocalState:
        """Return the result of `init` as `ShapeDtypeStruct`s: the target of a restore.

        Args:
            params: as for `init`, or from `zero.abstract`.
            opt_state: as for `init`, or `zero.init_optimizer` of abstract parameters.
            nodes: the number of nodes that saved the state; by default the number in this mesh. If
                they differ, give the restored state to `rejoin`.
        """
        tree_layouts = self._zero._layout_of(params), self._zero._layout_of(opt_state)
        layouts = self._lay_out(params, *tree_layouts)
        num = self.num_nodes if nodes is None else nodes

        def structs(kept: Kept) -> Any:
            leaves = kept.global_leaves(num, split=num == self.num_nodes)
            arrays = [stored_struct(leaf, self._zero.mesh, kept.axes) for leaf in leaves]
            pairs = zip(leaves, arrays, strict=True)
            return kept.build([stored_leaf(leaf, x) for leaf, x in pairs])

        return LocalState(**layouts.each(structs))

    def __call__(self, state: Any, batches: Any) -> tuple[LocalState, Any]:
        """Run one round of `method.every` steps on every node.

        Call it under `jax.jit(..., donate_argnums=0, compiler_options=jz.compiler_options(...))`,
        like a training step: without these options GPUs wait for the messages.

        Args:
            state: from `init`, `rejoin` or the previous round.
            batches: the batches of all steps, stacked: a tree of arrays `[every, rows, ...]`. Rows
                are split over all devices, as in `zero.value_and_grad`. A leaf without rows (a
                number or a random key for each step) is `[every]`, and every node gets all of it.

        Returns:
            The next state; and the metrics that the step returned, `[every, nodes, ...]`. The
            metrics of a node come from that node's parameters and rows.

        Raises:
            ValueError: `state` is of other trees than those given to `init`; `batches` are not
                stacked, or their rows cannot be split evenly; or the step does not return `(params,
                opt_state, metrics)` with trees like those it was given.
        """
        layouts = self._checked(state)
        specs = batch_specs(batches, self.method.every, self._zero.num_devices)
        arrays = {name: arrays_of(getattr(state, name)) for name in FIELDS}
        noted: dict[str, Any] = {}  # the structure of the metrics, once the step is traced
        rows, treedef = jax.tree.flatten(batches)

        def run(layouts: Layouts, arrays: Arrays, rows: list[Array]) -> Any:
            kept = layouts.each(Kept.spec)
            on_nodes = map_nodes(
                lambda arrays, rows: self._on_node(
                    layouts, noted, arrays, jax.tree.unflatten(treedef, rows)
                ),
                self._mesh,
                in_specs=(kept, node_specs(specs)),
                out_specs=(kept, PartitionSpec(None, NODE)),
            )
            kept_specs = layouts.each(
                lambda kept: [leaf.spec(kept.axes) for leaf in kept.global_leaves(self.num_nodes)]
            )
            mesh = self._zero.mesh
            new, metrics = on_nodes(*constrain_tree((arrays, rows), mesh, (kept_specs, specs)))
            return constrain_tree(new, mesh, kept_specs), metrics

        def program(arrays: Arrays, rows: list[Array]) -> Any:
            exchange = dataclasses.replace(layouts.exchange, has_tangents=True)
            exact = dataclasses.replace(layouts, exchange=exchange)
            kinds = (functools.partial(run, kind) for kind in (layouts, exact))
            return run_straight_through(*kinds, arrays, rows)

        new, metrics = self._zero._programs.run(program, arrays, rows)
        return self._state(layouts, new), jax.tree.unflatten(noted["metrics"], metrics)

    def mean(self, state: LocalState) -> Any:
        """Return the mean of all nodes' parameters, for evaluation; laid out as by `zero.init`.

        Nodes send their parameters without a codec. A leaf that is not of floats is taken from the
        first node. State that gradients overwrite (fp8 layers) is reduced by maximum, not mean.
        """
        kept, layout = self._checked(state).kept["params"], self._params_layout
        mesh, axes = self._zero.mesh, self._zero._weight_axes

        def make(arrays: list[Array], on: Mesh | SimulatedMesh) -> list[Array]:
            means = gathered_mean(arrays, kept, on)
            triples = zip(layout.leaves, kept.leaves, means, strict=True)
            return [pad_leaf(new, unpad_leaf(old, x)) for new, old, x in triples]

        arrays = arrays_of(state.params)
        if any(is_traced(x) for x in arrays):
            pairs = zip(make(arrays, self._mesh), layout.leaves, strict=True)
            return layout.stored([constrain(x, mesh, leaf.spec(axes)) for x, leaf in pairs])
        auto = auto_mesh(mesh)
        on = self._mesh if isinstance(self._mesh, SimulatedMesh) else auto
        run, programs = functools.partial(make, on=on), self._zero._programs
        return layout.stored(run_automatic(run, layout.shardings(auto, axes), programs, arrays))

    def rejoin(self, state: LocalState) -> LocalState:
        """Convert a state that was saved with another number of nodes to the nodes of this mesh.

        Every new node starts from the mean over the old nodes, of parameters, optimizer state and
        residuals. A leaf that is not of floats is taken from the first old node.

        Args:
            state: restored into `abstract(..., nodes=...)`.
        """
        layouts = self._checked(state, any_nodes=True)

        def mean(kept: Kept, arrays: list[Array]) -> list[Array]:
            pairs = zip(arrays, kept.overwritten, strict=True)
            return [mean_over_nodes(*pair) for pair in pairs] if kept.is_per_node else arrays

        def make(arrays: Arrays) -> Arrays:
            return for_nodes(layouts.each(mean, arrays), layouts, self.num_nodes)

        arrays = {name: arrays_of(getattr(state, name)) for name in FIELDS}
        return self._made(layouts, make, arrays)

    def report(self) -> LocalReport:
        """Report the bytes that a device holds between rounds, and that enter a node in a round.

        Call `init` or `abstract` before, which tell the shapes.

        Raises:
            ValueError: neither has been called.
        """
        layouts, method = self._known(), self.method
        exchange = layouts.exchange
        return LocalReport(
            every=method.every,
            fragments=method.fragments,
            delay=method.delay,
            codec=str(method.codec) if exchange.encoded else None,
            num_nodes=self.num_nodes,
            num_elements=sum(math.prod(leaf.shape) for leaf in exchange.leaves),
            device_bytes=layouts.each(lambda kept: kept.device_bytes(self._mesh)),
            message_bytes=exchange.message_bytes,
            kept_bytes=exchange.kept_bytes,
            bytes_between_nodes=exchange.node_bytes,
        )

    # Shared by the methods above.

    def _known(self) -> Layouts:
        if self._layouts is None:
            raise ValueError(
                "The rounds do not know the trees yet: make the state by `init(params, "
                "opt_state)`, or call `abstract` with them and restore it."
            )
        return self._layouts

    def _lay_out(self, params: Any, layout: TreeLayout, state_layout: TreeLayout) -> Layouts:
        """Lay out all arrays that the rounds of these trees keep; remember and return the layouts.

        The layouts on one node are also registered with the `Zero` of one node, which a step uses.
        """
        kinds = of_arrays(params, trained_leaves(params))
        for leaf, kind in zip(layout.leaves, kinds, strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating) and kind is not False:
                raise NotImplementedError(
                    f"`local_steps` cannot exchange the leaf `{leaf.path}` of {leaf.dtype}. Keep "
                    "its real and imaginary parts as two leaves."
                )
        states = of_arrays(params, overwritten_leaves(params))
        trained = [
            jnp.issubdtype(leaf.dtype, jnp.floating) and kind is not False and not is_state
            for leaf, kind, is_state in zip(layout.leaves, kinds, states, strict=True)
        ]
        if not any(trained):
            raise ValueError(
                "`params` has no float array to train, so there is nothing to exchange. Give "
                "`local_steps` the parameters; arrays that each node keeps for itself belong into "
                "`opt_state`."
            )
        inner = self._zero._on_one_node
        layouts = Layouts.of(
            self.method, layout, state_layout, trained, inner._devices, inner.config
        )
        warn_of_codec(layouts.exchange)
        inner._registry.add(layouts.params)
        inner._states.add(layouts.opt_state)
        outer, programs = self.method.outer, self._zero._programs
        warn_of_padding(outer, layouts.outer_layout, programs, remedy=_OF_OUTER, as_arrays=True)
        self._layouts, self._params_layout = layouts, layout
        return layouts

    def _checked(self, state: Any, any_nodes: bool = False) -> Layouts:
        """Check that `state` is a `LocalState` of the known trees; return its layouts.

        Raises:
            ValueError: `state` is not a `LocalState` of these trees; or, unless `any_nodes`, it has
                another number of nodes.
        """
        layouts = self._known()
        if not isinstance(state, LocalState):
            raise ValueError(
                "`state` must be a `LocalState` from `init`, `rejoin` or the last round; got "
                f"{type(state).__name__}. Do you mean `rounds.init(params, opt_state)`?"
            )
        arrays = arrays_of(state.params)
        nodes = arrays[0].shape[0] if arrays and arrays[0].ndim else self.num_nodes
        if nodes != self.num_nodes and not any_nodes:
            raise ValueError(
                f"`state` is of {nodes} nodes, and the mesh has {self.num_nodes}: give it to "
                "`rejoin` first."
            )
        for name, kept in layouts.kept.items():
            tree, leaves = getattr(state, name), kept.global_leaves(nodes)
            wanted = kept.tree(nodes, [leaf.stored for leaf in leaves])
            check_kept(name, tree, wanted, nodes if kept.is_per_node else None)
        return layouts

    def _made(self, layouts: Layouts, make: Callable[..., Any], arrays: Any) -> LocalState:
        """Run `make(arrays)`; each device makes only its own shards. Return the `LocalState`."""
        mesh, nodes = auto_mesh(self._zero.mesh), self.num_nodes
        shardings = layouts.each(
            lambda kept: [x.sharding(mesh, kept.axes) for x in kept.global_leaves(nodes)]
        )
        made = run_automatic(make, shardings, self._zero._programs, arrays)
        return self._state(layouts, made)

    def _state(self, layouts: Layouts, arrays: Arrays) -> LocalState:
        fields = layouts.each(lambda kept, xs: kept.tree(self.num_nodes, xs), arrays)
        return LocalState(**fields)

    def _on_node(
        self, layouts: Layouts, noted: dict[str, Any], arrays: Arrays, batches: Any
    ) -> Any:
        """Run the round of one node; store the structure of the metrics in `noted["metrics"]`."""
        # Arrays of each node have a leading dim of nodes; here it has length 1.
        mine = layouts.each(lambda kept, xs: [x[0] for x in xs] if kept.is_per_node else xs, arrays)
        inner = Inner(mine["params"], mine["opt_state"])
        outer = Outer(mine["outer_params"], mine["outer_state"], mine["residuals"])
        step = LocalStep(self._step, layouts, self._zero.mesh, noted)
        carry, metrics = run_round(
            step, layouts.exchange, layouts.exchanged, Carry(inner, outer), batches
        )
        new = dict(zip(FIELDS, (*carry.inner, *carry.outer), strict=True))
        new = layouts.each(lambda kept, xs: [x[None] for x in xs] if kept.is_per_node else xs, new)
        return new, [jnp.expand_dims(x, 1) for x in metrics]
