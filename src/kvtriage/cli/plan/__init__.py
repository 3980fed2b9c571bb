"""`kvtriage plan`: one question about a cache, asked and answered.

command       the options, and which of the four questions they ask
engine_flags  vLLM's own flags
words         layers, lengths and amounts as they are typed
model         the config.json, wherever it lies
question      what was typed, with every open value filled in
answer        all there is to say, worked out once
rows          the answer as rows of words, for text and for Markdown
paragraphs    text in 80 columns
as_text, engine_text, as_markdown, as_json   its three forms
sweep, plot   --sweep
against       --against
cases         --cases
"""
