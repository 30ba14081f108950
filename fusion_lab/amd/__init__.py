"""AMD's machine code, executed on a CPU: the assembly that Triton makes for an MI300X (gfx942) or
an MI200 (gfx90a), instruction by instruction, with registers as NumPy arrays.

record.py records what a program launches, compile.py compiles it. assembly.py reads the text,
manual.py says what instructions do, waves.py holds registers, execute.py and transfers.py join the
three, memory.py has tensors and LDS, launch.py runs a grid, counters.py tells what hardware would
have counted, agreement.py whether a result is right. __main__.py is the command line.
"""
