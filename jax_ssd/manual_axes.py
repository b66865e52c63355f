"""Inside shard_map: operands that vary over different mesh axes, brought to one type.

An op's results vary over every mesh axis that any operand varies over. Casting the operands first keeps that promise in
the types and, being differentiable, makes the gradient of a replicated operand the sum over the axes it was cast to.
"""

import jax


def unified(tree):
    """The same arrays, each varying over the union of all arrays' manual axes."""
    names: frozenset[str] = frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(tree)))
    return cast(tree, names) if names else tree


def cast(tree, names: frozenset[str]):
    """The same arrays, each varying over these manual axes as well."""

    def one(leaf):
        missing = tuple(sorted(names - varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree)


def varying(array) -> frozenset[str]:
    """The manual axes that an array varies over; none where the checks of shard_map are off, nor under pmap."""
    aval = jax.typeof(array)
    # The name of this attribute has changed between releases. There is no default: were both missing, the gradients of
    # replicated parameters would be those of one shard.
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
