"""The local web explorer: a page on the loopback that asks this program for every figure.

subject    what is explored: a model's cache, how it is served, what a case measured of it
choice     what the page asks about, from the text of a query
policies   from a choice to a policy and the engine's flags
pricing    one policy's prices, why they differ, what is refused, the line to serve it with
toggles    what each single layer would cost or free
damage     what the policy is likely to do to the answers, from the sensitivities
latency    what a decoded token is likely to take, from the fits
front      sets of layers worth looking at
layers     the layers as the page draws them
tail       a file of trials that is still being written
progress   a study under way: arms, intervals, clauses
watch      a case that is watched, and read no more often than needed
server     the loopback socket, and nothing but our own files and answers

Nothing is written, no case is locked, and the page computes no price of its own.
"""
