#!/usr/bin/env python3
"""Print `yes` where PyTorch sees a GPU, nothing elsewhere.

Example:
  GPU=$(python exercises/gpu.py)
"""

import torch

if torch.cuda.is_available():
    print("yes")
