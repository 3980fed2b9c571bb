"""Decode attention over the bytes of the cache: each stored element is widened once, in a register.

`machine` knows the CPU, `vectors` and `instructions` write vector instructions, `tiles` makes of them the steps that
read K and V, `softmax` what lies between, `control` keeps subnormals, `decode` puts all together, `write` stores a
token, and `kernel` is what the engine calls.
Compiled by numba for the CPU that runs it.
"""
