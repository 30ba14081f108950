"""AMD's machine code, executed on a CPU: the assembly that Triton makes for an MI300X (gfx942),
instruction by instruction, with registers as NumPy arrays.

record.py records what a program launches, compile.py compiles it. assembly.py reads the text,
manual.py says what instructions do, waves.py and memory.py hold registers, tensors and LDS,
operands.py reads and writes them, execute.py and transfers.py join these, launch.py runs a grid,
counters.py tells what hardware would have counted, agreement.py whether a result is right.
"""
