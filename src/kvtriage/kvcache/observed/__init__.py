"""A server that has been started: what it said of itself, held against what is predicted.

log_values  Python values as a log prints them
reading     a log or a page of metrics, line by line
settings    what the engine was told, and where each setting comes from
comparison  predicted against reported, and what would explain a difference
"""
