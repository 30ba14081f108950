"""AMD's machine code, executed on a CPU: the assembly that Triton makes for gfx942 (gfx90a, gfx950
where they differ), instruction by instruction, with registers as NumPy arrays.

assembly.py reads the text, manual.py says what instructions do, waves.py holds registers,
execute.py and memory.py join the three, launch.py compiles a Triton kernel and runs its grid,
counters.py tells what hardware would have counted, step.py shows it to people. checksums.py tells
of which source and machine code a result is.
"""
