"""The commands of `python -m jax_ssd`, one module each: `main(arguments) -> exit status`."""
