"""Dynamic sparse ring attention for long-context training, as a torchtitan recipe."""

from mtraining_flex import cpu_device

# Before anything imports torchtitan, which takes its device once and for all.
cpu_device.install()
