"""Sampling's arithmetic on a device: `triton` has the kernels that `common.sampling.device` runs.

The definition is `common.sampling.sampler`; there is none here, because a row's parameters belong
to sampling. An entry says what happens to the logit of an id: `HAS_BIAS` (a bias is added),
`IS_STOP` (never, before the minimum length), `IS_SEEN` (it is in the prompt), and from
`COUNT_SHIFT` on how often it was emitted. A row's top_k and top_p are found in a list of up to
`SURE` words of eight bytes that are kept and `OPEN` that may be.
"""

HAS_BIAS, IS_STOP, IS_SEEN, COUNT_SHIFT = 1, 2, 4, 8
SURE, OPEN = 1 << 14, 1 << 12
