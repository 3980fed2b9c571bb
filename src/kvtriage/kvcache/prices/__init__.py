"""What a request costs, why, and what would cost less.

held      blocks that one request holds, step by step
peak      the worst step of its prefill
causes    why the engine reserves more than the worksheet counts
explain   the three prices side by side, and the causes between them
gain      FP8 over BF16, by length of the context
ladders   flags that may buy capacity
advice    what the same memory would report under them
sweep     many policies at once
pareto    those that nobody would pass over
"""
