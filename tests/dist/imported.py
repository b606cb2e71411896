"""What ranks have imported when they are forked: seconds of CPU time, spent once and not by each.

Nothing here computes, or starts a thread: a fork has neither.
"""

from __future__ import annotations

import os

from tests import collector

os.environ["OMP_NUM_THREADS"] = "1"
collector.collect_less_often()

import torch.distributed.checkpoint  # noqa: E402
import torch.distributed.tensor  # noqa: E402, F401
from transformers import GPT2LMHeadModel, LlamaForCausalLM, Trainer  # noqa: E402, F401

from autopar.api import compile, planning  # noqa: E402, F401
from tests.dist import training  # noqa: E402, F401

collector.keep_what_lives()
