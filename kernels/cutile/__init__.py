"""Tile kernels written in cuTile: functions over arrays, sizes and compile-time constants.

Shared conventions. Every size is a compile-time constant: sizes are static in the calls that these kernels serve, so
the compiler knows all strides and prunes every option that is off. An absent optional array is replaced by any other
array and never touched. Per-head parameters are [rows, heads, ...] with one row for all batch rows or one each. Tile
dimensions are powers of two: head_dim and state are padded with zeros on load and cut on store. Grids use axis x only.
"""
