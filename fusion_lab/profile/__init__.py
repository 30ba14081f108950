"""Profiles of training steps: kernels by name, FLOPs and bytes, and the ceilings of a device."""
