"""What an engine on a GPU takes and refuses, and the memory that it has.

gpus            the machines, as far as they decide anything
memory_band     how many bytes the cache may get
backend_table   what each attention backend serves
backend_choice  which of them is taken, layer by layer
cautions        what starts and is known to end badly
findings        what is refused before weights load, and the cautions that apply
"""
