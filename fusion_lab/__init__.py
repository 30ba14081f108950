"""What the programs share, one module for one subject. Nothing here imports a program."""
