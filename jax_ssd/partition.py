"""Sharding of an op over a device mesh: along batch and heads, without moving activations.

Axes are named by letters: b batch, t sequence, h heads, g groups of heads, p head_dim, n state, r parameter rows (1 or
batch), m rank, a rotated pairs, s packed sequences, c their boundaries. Only b and h are ever sharded; any other
sharded axis is gathered first, because the recurrence needs the whole of it. Groups follow the heads: a shard that
holds whole groups holds just those of B and C; where head shards cut through groups, B and C are replicated over them,
each shard slices what its heads read, and the gradients of B and C are summed over those shards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]  # mesh axis names that share one array axis

_WHOLE = ("t", "p", "n", "m", "a", "s", "c")  # letters of axes that are never sharded


def partitioned(
    function: Callable[..., tuple[jax.Array, ...]], operand_letters: Sequence[str], result_letters: Sequence[str]
) -> Callable[..., tuple[jax.Array, ...]]:
    """`function` with a partitioning rule; every result has axes named by `result_letters`."""
    wrapped = custom_partitioning(function)
    letters = (tuple(operand_letters), tuple(result_letters))

    def partition(mesh, operands, results):
        layout = _layout(mesh, operands, results, *letters)
        arguments = tuple(layout.sharding(x.shape, axes) for x, axes in zip(operands, letters[0], strict=True))
        outcomes = tuple(layout.sharding(x.shape, axes) for x, axes in zip(results, letters[1], strict=True))
        return mesh, _outside_of_meshes(layout.local(function, *letters)), outcomes, arguments

    def infer(mesh, operands, results):
        layout = _layout(mesh, operands, results, *letters)
        return tuple(layout.sharding(x.shape, axes) for x, axes in zip(results, letters[1], strict=True))

    def rule(mesh, operand_types, result_types):
        del mesh
        shapes = ([tuple(t.shape) for t in operand_types], [tuple(t.shape) for t in result_types])
        return _shardy_rule(*letters, *shapes)

    wrapped.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return wrapped


def _outside_of_meshes(function: Callable) -> Callable:
    """`function` for one shard: a mesh that the caller has set with jax.set_mesh means nothing in it."""

    def run(*operands):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*operands)

    return run


def explicit_results(
    operands: Sequence[jax.Array], operand_letters: Sequence[str], result_letters: Sequence[str]
) -> tuple[PartitionSpec, ...] | None:
    """The results' shardings where those of operands are part of their types (AxisType.Explicit), else None.

    A result is sharded like the operand that it belongs to, the next with its letters; where there is none, along batch
    and heads as any operand is.
    """
    specs = [(*jax.typeof(x).sharding.spec, *(None,) * x.ndim)[: x.ndim] for x in operands]
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return None
    somewhere: dict[str, Any] = {}
    for spec, letters in zip(specs, operand_letters, strict=True):
        somewhere |= {
            letter: axes
            for letter, axes in zip(letters, spec, strict=True)
            if letter in "bh" and axes is not None and letter not in somewhere
        }
    left = [*zip(operand_letters, specs, strict=True)]
    results = []
    for letters in result_letters:
        own = next((one for one in left if one[0].replace("r", "b") == letters), None)
        if own is None:
            results.append(PartitionSpec(*(somewhere.get(letter) for letter in letters)))
            continue
        left.remove(own)
        axes = (somewhere.get("b") if letter == "r" else axis for letter, axis in zip(*own, strict=True))
        results.append(PartitionSpec(*axes))
    return tuple(results)


@dataclass(frozen=True)
class _Layout:
    """The shardings chosen for one call."""

    mesh: Mesh
    batch: Axes
    heads: Axes
    head_count: int
    group_count: int

    @property
    def head_shards(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.heads)

    @property
    def groups_follow_heads(self) -> bool:
        return self.group_count % self.head_shards == 0

    def sharding(self, shape: Sequence[int], letters: str) -> NamedSharding:
        def axis(letter, size):
            if letter == "b" or (letter == "r" and size > 1):
                return self.batch or None
            if letter == "h" or (letter == "g" and self.groups_follow_heads):
                return self.heads or None
            return None

        return NamedSharding(self.mesh, PartitionSpec(*(axis(a, n) for a, n in zip(letters, shape, strict=True))))

    def local(self, function, operand_letters, result_letters):
        """What each shard runs on its part of the operands."""
        if self.groups_follow_heads:
            return function

        local_heads = self.head_count // self.head_shards
        heads_per_group = self.head_count // self.group_count
        # The shard's heads cut into blocks that each read one group: its groups, some perhaps more than once.
        block = math.gcd(local_heads, heads_per_group)
        blocks = local_heads // block

        def run(*operands):
            first_head = jax.lax.axis_index(self.heads) * local_heads
            read = (first_head + jnp.arange(blocks) * block) // heads_per_group
            operands = [
                jnp.take(x, read, axis=axes.index("g")) if "g" in axes else x
                for x, axes in zip(operands, operand_letters, strict=True)
            ]
            results = function(*operands)
            return tuple(
                self._sum_groups(x, read, axes.index("g")) if "g" in axes else x
                for x, axes in zip(results, result_letters, strict=True)
            )

        return run

    def _sum_groups(self, part: jax.Array, read: jax.Array, axis: int) -> jax.Array:
        """Add each block's share to its group, in float32, over the block's own shard and then over all head shards."""
        part = jnp.moveaxis(part, axis, 0)
        wide = part.astype(jnp.float64 if part.dtype == jnp.float64 else jnp.float32)
        whole = jnp.zeros((self.group_count, *part.shape[1:]), wide.dtype).at[read].add(wide)
        return jnp.moveaxis(jax.lax.psum(whole, self.heads).astype(part.dtype), 0, axis)


def _layout(mesh, operands, results, operand_letters, result_letters) -> _Layout:
    arrays = [*zip(operands, operand_letters, strict=True), *zip(results, result_letters, strict=True)]
    sizes = {letter: n for x, axes in arrays for letter, n in zip(axes, x.shape, strict=True)}
    batch = _axes_of("b", sizes["b"], mesh, arrays, taken=())
    heads = _axes_of("h", sizes["h"], mesh, arrays, taken=batch)
    return _Layout(mesh, batch, heads, sizes["h"], sizes.get("g", 1))


def _axes_of(letter: str, size: int, mesh: Mesh, arrays, taken: Axes) -> Axes:
    """The mesh axes that already shard this letter somewhere, as many of them as divide it evenly."""
    for array, letters in arrays:
        spec = getattr(array.sharding, "spec", None)
        if letter not in letters or spec is None:
            continue
        entry = (*spec, *(None,) * len(letters))[letters.index(letter)]
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        chosen: Axes = ()
        for name in names:
            if name not in taken and size % math.prod(mesh.shape[n] for n in (*chosen, name)) == 0:
                chosen = (*chosen, name)
        if chosen:
            return chosen
    return ()


def _shardy_rule(operand_letters, result_letters, operand_shapes, result_shapes) -> SdyShardingRule:
    """The same knowledge in the compiler's terms, which only steer propagation: `partition` has the last word.

    Groups get a factor of their own unless they equal the heads. Writing heads as (group, head of the group) would say
    more, but where head shards outnumber groups it makes the compiler split a mesh axis, which no PartitionSpec can
    say.
    """
    pairs = [*zip(operand_letters, operand_shapes, strict=True), *zip(result_letters, result_shapes, strict=True)]
    sizes = {letter: n for letters, shape in pairs for letter, n in zip(letters, shape, strict=True)}
    order: list[str] = []

    def factor(letter, size):
        if letter == "r":
            letter = "b" if size > 1 else "r"
        if letter == "g" and size == sizes["h"]:
            letter = "h"
        order.append(letter)
        return letter

    mappings = tuple(
        ArrayMapping(*(factor(a, n) for a, n in zip(letters, shape, strict=True))) for letters, shape in pairs
    )
    return SdyShardingRule(
        mappings[: len(operand_letters)],
        mappings[len(operand_letters) :],
        need_replication_factors=tuple(dict.fromkeys(name for name in order if name in _WHOLE)),
    )
