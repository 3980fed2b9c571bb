"""A server that has been started: what it said of itself, held against what is predicted.

account       what it says of itself: settings and answers
gathered      what has been read so far, checked as it comes
log_values    Python values as a log prints them
log_lines     the lines of a log that count
metrics_page  the labels of a metrics page that count
reading       a log or a page of metrics, line by line
settings      what the engine was told, and where each setting comes from
identity      whether it is the model that was asked about
comparison    predicted against reported, and what would explain a difference
"""
