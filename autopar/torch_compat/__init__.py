"""The one place that imports torch's private or version-dependent parts; each import says what needs it and why.

`tracing` serves capture and differentiation, `distributed` the runtime. Tested on torch 2.11 and 2.13.
"""
