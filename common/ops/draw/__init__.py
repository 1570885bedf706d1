"""Sampling's arithmetic on a device: `triton` has the kernels that `common.sampling.device` runs.

The definition is `common.sampling.sampler`; there is none here, because a row's parameters belong
to sampling.
"""
