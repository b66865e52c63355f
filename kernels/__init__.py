"""Device code only: no JAX, no XLA. Installed as `jax_ssd.kernels`."""
